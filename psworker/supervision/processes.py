"""Processes of a run: each in its own session, with its output read line by line.

A `PreloadedServer` has imported everything before it is needed.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import PIPE
from typing import Literal, Protocol

from pscommon.system.process_id import process_id
from psworker.supervision.orphan_guard import spawn

Stream = Literal["stdout", "stderr"]
OnLine = Callable[[str, Stream, str], None]
OnExit = Callable[["Process", int], None]

TAIL_LINES = 20
MAX_LINE_BYTES = 64 << 10
POLL_SECONDS = 0.1
DRAIN_SECONDS = 1.0


class Process(Protocol):
    """A process of a run, on this machine or another one.

    Attributes:
        name: its name.
        log: its log file, on this machine.
        tail: last lines of the output.
        traceback: traceback of the script, as lines.
        identity: identity of the process (`pscommon.system.process_id`).
        host: name of its host.
        pid: its id there; 0 until it has started.
    """

    name: str
    log: Path
    tail: deque[str]
    traceback: list[str]
    identity: str
    host: str

    @property
    def pid(self) -> int: ...

    def terminate(self) -> None:
        """Send SIGTERM to the process, which ends its children itself."""

    def resume(self) -> None:
        """Send SIGCONT: a process stopped by SIGSTOP does not handle SIGTERM."""

    def kill(self) -> None:
        """Send SIGKILL to the process and its children."""

    def join(self) -> None:
        """Wait until the output is read and on_exit has returned."""


class LineSplitter:
    """Splitter of a byte stream into lines; a line with carriage returns gives its last part."""

    def __init__(self) -> None:
        self._incomplete = b""

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that are complete after `data`."""
        *complete, self._incomplete = (self._incomplete + data).split(b"\n")
        if len(self._incomplete) > MAX_LINE_BYTES:
            complete.append(self._incomplete)
            self._incomplete = b""
        return [_text(line) for line in complete]

    def flush(self) -> list[str]:
        """Return the incomplete last line, if any."""
        line, self._incomplete = self._incomplete, b""
        return [_text(line)] if line else []

    def take_prompt(self) -> str:
        """Return the incomplete last line, and drop it; "" for a line that overwrites itself."""
        return "" if b"\r" in self._incomplete else "".join(self.flush())


def _text(line: bytes) -> str:
    return line.rstrip(b"\r").rsplit(b"\r", 1)[-1].decode("utf-8", "replace")


class LogFile:
    """File that loses lines instead of failing on a disk error.

    The first of consecutive errors is reported. The file is opened for each write, so a rotated
    file is created again.
    """

    def __init__(self, path: Path, report: Callable[[str], None]) -> None:
        """Make the log; `report` is called with a text about an error."""
        self._path, self._report = path, report
        self._is_failing = False

    def write(self, data: bytes) -> None:
        try:
            with self._path.open("ab") as file:
                file.write(data)
        except OSError as error:
            if not self._is_failing:
                self._report(
                    f"{self._path} cannot be written: {error.strerror}; "
                    f"the process continues without its log"
                )
            self._is_failing = True
        else:
            self._is_failing = False


class ManagedProcess:
    """A process of this machine and the thread that reads its output; see `Process`.

    The thread writes the output to `log`, calls `on_line` for each line, and `on_exit` last. A
    process with `on_prompt` reads stdin of this process. It belongs to another session, so reading
    the terminal does not stop it, and Ctrl-C does not reach it.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        *,
        traceback_file: Path,
        on_line: OnLine,
        on_exit: OnExit,
        on_prompt: OnLine | None = None,
        spawned: "subprocess.Popen[bytes] | None" = None,
    ) -> None:
        """Start the process, or adopt a preloaded one (`spawned`); call from the main thread.

        on_prompt: Called with the incomplete last line of stdout, such as a debugger's prompt.
        """
        self.name = name
        self.log = log
        self.host = socket.gethostname()
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.traceback: list[str] = []
        self._traceback_file = traceback_file
        self._on_line = on_line
        self._on_exit = on_exit
        self._on_prompt = on_prompt
        self._lock = threading.Lock()
        self._is_group_killed = False
        stdin = subprocess.DEVNULL if on_prompt is None else None
        self._process = spawned or spawn(
            command, environment, stdin=stdin, stdout=PIPE, stderr=PIPE
        )
        # before any wait(): until then the pid cannot be reused
        self.identity = process_id(self._process.pid)
        self._thread = threading.Thread(target=self._follow, name=f"follow-{name}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Return the process id, which is also the id of its process group."""
        return self._process.pid

    def terminate(self) -> None:
        with self._lock:
            if self._process.poll() is None:
                self._process.terminate()

    def resume(self) -> None:
        with self._lock:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        with self._lock:
            if self._process.poll() is None:
                self._kill_group()

    def join(self) -> None:
        self._thread.join()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _follow(self) -> None:
        """Read the output to its end; always call on_exit. After an error kill the process."""
        log = LogFile(self.log, lambda problem: self._emit("stderr", [problem]))
        try:
            with selectors.DefaultSelector() as selector:
                for stream in ("stdout", "stderr"):
                    selector.register(
                        getattr(self._process, stream),
                        selectors.EVENT_READ,
                        (stream, LineSplitter()),
                    )
                self._read(selector, log)
                self._process.wait()
                self._read_traceback(log)
        except OSError as error:
            self.tail.append(str(error))
        finally:
            self.kill()
            code = self._process.wait()
            self._kill_remaining_group()
            for pipe in (self._process.stdout, self._process.stderr):
                if pipe is not None:
                    pipe.close()
            self._on_exit(self, code)

    def _read(self, selector: selectors.BaseSelector, log: LogFile) -> None:
        """Read until both streams end, at most DRAIN_SECONDS after the end of the process.

        Children of an ended process may still have the streams open.
        """
        deadline = float("inf")
        while selector.get_map() and time.monotonic() < deadline:
            events = selector.select(POLL_SECONDS)
            if not events:
                self._show_prompt(selector)
            for key, _ in events:
                stream, lines = key.data
                data = os.read(key.fd, 1 << 16)
                log.write(data)
                self._emit(stream, lines.feed(data) if data else lines.flush())
                if not data:
                    selector.unregister(key.fileobj)
            if deadline == float("inf") and self._has_ended():
                deadline = time.monotonic() + DRAIN_SECONDS
        for key in list(selector.get_map().values()):
            self._emit(key.data[0], key.data[1].flush())

    def _show_prompt(self, selector: selectors.BaseSelector) -> None:
        """Show what stdout holds of an incomplete line: no more has come for POLL_SECONDS."""
        if self._on_prompt is None:
            return
        for key in selector.get_map().values():
            stream, lines = key.data
            if stream == "stdout" and (text := lines.take_prompt()):
                self.tail.append(text)
                self._on_prompt(self.name, stream, text)

    def _has_ended(self) -> bool:
        """Return whether the process has ended; kill its children then."""
        with self._lock:
            if self._process.poll() is None:
                return False
        self._kill_remaining_group()
        return True

    def _kill_remaining_group(self) -> None:
        """Kill the group once, right after the end: later its number could be reused."""
        if not self._is_group_killed:
            self._is_group_killed = True
            self._kill_group()

    def _emit(self, stream: Stream, lines: Sequence[str]) -> None:
        for line in lines:
            self.tail.append(line)
            self._on_line(self.name, stream, line)

    def _read_traceback(self, log: LogFile) -> None:
        """Move the traceback of the script into the log."""
        if self._traceback_file.exists():
            text = self._traceback_file.read_text(encoding="utf-8", errors="replace")
            self._traceback_file.unlink()
            log.write(text.encode())
            self.traceback = text.splitlines()


class PreloadedServer:
    """Process that waits for the arguments of a server on stdin."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the process, like psserver.preload; call this from the main thread."""
        self._process = spawn(command, environment, stdin=PIPE, stdout=PIPE, stderr=PIPE)

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self, arguments: Sequence[str]) -> "subprocess.Popen[bytes] | None":
        """Turn the process into a server with these arguments; None if it has ended."""
        stdin = self._process.stdin
        try:
            assert stdin is not None
            stdin.write(json.dumps([*arguments]).encode() + b"\n")
            stdin.close()
        except OSError:
            self.end()
            return None
        return self._process

    def end(self) -> None:
        """Kill the process."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                # closing flushes data that the process did not read
                with contextlib.suppress(OSError):
                    pipe.close()
