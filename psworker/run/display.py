"""Display of ps-run: prefixed output lines of all processes, and the progress of the job."""

import io
import threading
import time
from collections.abc import Mapping
from typing import Any, Protocol, TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from psworker.ctl.output import pass_text
from psworker.run.job_poller import Status
from psworker.run.output import Output
from psworker.run.summary import label
from psworker.supervision.processes import Stream

LINE_SECONDS = 5.0
PANEL_SECONDS = 0.25
MAX_METRICS = 4


class Display(Protocol):
    """Display used from any thread; no method raises.

    Only `line` blocks while the reader of the output is slow, and not after `stop_blocking`.
    """

    def line(self, name: str, stream: Stream, text: str, is_prompt: bool = False) -> None:
        """Show a line of output of process `name`.

        is_prompt: It is not complete and may wait for input. The next output of that process
            continues the line.
        """

    def show_message(self, text: str) -> None:
        """Show a line of ps-run itself."""

    def tick(self, status: Status, now: float) -> None:
        """Update the progress; called several times a second, with {} if there is no status."""

    def stop_blocking(self) -> None:
        """Drop lines from now on instead of blocking on a slow reader; the run is ending."""

    def close(self) -> None:
        """Remove what is not part of the output; printed lines stay."""


class OpenLine:
    """The line on the terminal that a prompt has begun and that nothing has ended yet."""

    def __init__(self) -> None:
        self._name = ""

    def __bool__(self) -> bool:
        return bool(self._name)

    def prefix(self, name: str, is_prompt: bool = False) -> tuple[str, str]:
        """Return what ends another process's line, and the name before the next text."""
        before, self._name = self._name, name if is_prompt else ""
        return "\n" * (before not in ("", name)), "" if before == name else f"[{name}] "


class PlainDisplay:
    """Display for logs and pipes: lines, with a progress line every LINE_SECONDS."""

    def __init__(self, out: Output, err: Output) -> None:
        self._streams: dict[Stream, Output] = {"stdout": out, "stderr": err}
        self._next = time.monotonic() + LINE_SECONDS
        self._last = ""
        self._open = OpenLine()

    def line(self, name: str, stream: Stream, text: str, is_prompt: bool = False) -> None:
        if is_prompt or self._streams[stream].wait_for_space():
            self._write(stream, name, text if is_prompt else text + "\n", is_prompt)

    def show_message(self, text: str) -> None:
        self._write("stderr", "run", text + "\n")

    def _write(self, stream: Stream, name: str, text: str, is_prompt: bool = False) -> None:
        self._streams[stream].write("".join([*self._open.prefix(name, is_prompt), text]))

    def tick(self, status: Status, now: float) -> None:
        if now >= self._next:
            self._next = now + LINE_SECONDS
            text = progress(status)
            is_free = not self._open and not self._streams["stderr"].is_behind
            if text and text != self._last and is_free:
                self._last = text
                self.show_message(text)

    def stop_blocking(self) -> None:
        for output in self._streams.values():
            output.stop_blocking()

    def close(self) -> None:
        """Do nothing: lines are all that was shown."""


class LiveDisplay:
    """Display for a terminal: lines scroll above a live panel."""

    def __init__(self, console: Console, out: Output, err: Output) -> None:
        """Show the panel; `console` writes to `err`."""
        self._console = console
        self._out = None if out.isatty() else out
        self._err = err
        self._status: Status = {}
        self._next = 0.0
        self._open, self._lock = OpenLine(), threading.Lock()
        self._live = self._make_live()
        self._live.start()

    def _make_live(self) -> Live:
        return Live(
            get_renderable=self._panel,
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def line(self, name: str, stream: Stream, text: str, is_prompt: bool = False) -> None:
        """As Display says; the panel goes until a prompt's line is complete."""
        if stream == "stdout" and self._out is not None and not is_prompt:
            if self._out.wait_for_space():
                self._out.write(f"[{name}] {text}\n")
        elif is_prompt or self._err.wait_for_space():
            self._print(name, text, is_prompt)

    def show_message(self, text: str) -> None:
        self._print("run", text)

    def tick(self, status: Status, now: float) -> None:
        self._status = status
        with self._lock:
            if self._open:  # the panel returns a moment after the line, not between two prompts
                self._next = now + PANEL_SECONDS
            elif now >= self._next and not self._err.is_behind:
                self._next = now + PANEL_SECONDS
                if not self._live.is_started:
                    self._live = self._make_live()  # a Live that is used again erases lines above
                    self._live.start()
                self._live.refresh()

    def stop_blocking(self) -> None:
        self._err.stop_blocking()
        if self._out is not None:
            self._out.stop_blocking()

    def close(self) -> None:
        self._live.stop()

    def _print(self, name: str, text: str, is_prompt: bool = False) -> None:
        colour = {"s": "cyan", "w": "green"}.get(name[0], "bold")
        with self._lock:
            if is_prompt:
                self._live.stop()
            end, prefix = self._open.prefix(name, is_prompt)
            line = Text.assemble(end, (prefix, colour), Text.from_ansi(text))
            self._console.print(line, soft_wrap=True, end="" if is_prompt else "\n")

    def _panel(self) -> RenderableType:
        return panel(self._status)


class LogWriter(io.TextIOBase):
    """Stream that shows its lines as messages of ps-run; for its own log."""

    def __init__(self, display: Display) -> None:
        self._display = display

    def write(self, text: str) -> int:
        """Show each line of `text`."""
        for line in text.splitlines():
            self._display.show_message(line)
        return len(text)


def open_display(out: Output, err: Output) -> Display:
    """Return a LiveDisplay for a terminal that can move its cursor, otherwise a PlainDisplay."""
    console = Console(file=cast(TextIO, err))
    if err.isatty() and not console.is_dumb_terminal:
        return LiveDisplay(console, out, err)
    return PlainDisplay(out, err)


def progress(status: Status) -> str:
    """Format the status as one line, the least important values last; "" without a status.

    Example: 'running: version 9, pass 1 of 3: 40 %, 9 s left, loss 0.3, ...'.
    """
    if not status:
        return ""
    metrics = sorted(
        status.get("metrics", {}).items(), key=lambda item: (item[0] != "loss", item[0])
    )
    shown = [
        f"{label(name)} not finite" if value is None else f"{label(name)} {value:.4g}"
        for name, value in metrics[:MAX_METRICS]
    ]
    parts = [
        f"version {status.get('version', 0)}",
        *filter(None, [pass_text(status.get("progress"))]),
        *shown[:1],
        f"{_rate(status):.0f} samples/s",
        *shown[1:],
        f"{status.get('samples', 0)} samples",
        f"workers {len(_present(status))}",
    ]
    if status.get("waiting_for"):
        parts.append(f"waiting for {status['waiting_for']}")
    return f"{status.get('state', 'unknown')}: " + ", ".join(parts)


def panel(status: Status) -> RenderableType:
    """Return the live panel: one line for the job and one for each worker."""
    grid = Table.grid(padding=(0, 2))
    for worker in _present(status):
        grid.add_row(
            f"w{worker.get('rank', '?')}",
            str(worker.get("phase", "")),
            f"{worker.get('steps', 0)} steps",
            f"{1000 * worker.get('step_seconds', 0.0):.0f} ms",
            f"{worker.get('samples_per_second', 0.0):.0f} samples/s",
            str(worker.get("device", "")),
        )
    headline = Text(progress(status) or "starting", style="bold", no_wrap=True, overflow="ellipsis")
    return Group(headline, grid) if grid.row_count else headline


def _present(status: Status) -> list[Mapping[str, Any]]:
    return [
        worker
        for worker in status.get("workers", [])
        if worker.get("state") not in ("lost", "left", "past")
    ]


def _rate(status: Status) -> float:
    return sum(worker.get("samples_per_second") or 0.0 for worker in _present(status))
