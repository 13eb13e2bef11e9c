"""The display of ps-run, on a terminal and elsewhere."""

import io
from contextlib import closing
from pathlib import Path
from typing import Any, TextIO, cast

import pytest
from rich.console import Console

from psworker.ctl.output import pass_text
from psworker.run.display import (
    LINE_SECONDS,
    LiveDisplay,
    LogWriter,
    PlainDisplay,
    open_display,
    panel,
    progress,
)
from psworker.run.job_poller import Status
from psworker.run.output import Output

STATUS: dict[str, Any] = {
    "state": "running",
    "version": 120,
    "samples": 7680,
    "waiting_for": "",
    "metrics": {"accuracy": 0.5, "loss": 0.4123},
    "workers": [
        {
            "rank": 0,
            "state": "active",
            "phase": "compute",
            "steps": 60,
            "step_seconds": 0.05,
            "samples_per_second": 640,
        },
        {
            "rank": 1,
            "state": "lost",
            "phase": "push",
            "steps": 9,
            "step_seconds": 0.05,
            "samples_per_second": 999,
        },
    ],
}


@pytest.fixture(autouse=True)
def capable_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a terminal that can show a panel, whatever the test's own is."""
    monkeypatch.setenv("TERM", "xterm-256color")


class FileOutput(Output):
    """Output that writes to a file. text() returns the written text."""

    def __init__(self, path: Path, terminal: bool = False) -> None:
        self._path = path
        self._terminal = terminal
        self._file = path.open("w", encoding="utf-8")
        super().__init__(self._file)

    def isatty(self) -> bool:
        return self._terminal

    def text(self) -> str:
        self.finish()
        return self._path.read_text(encoding="utf-8")


@pytest.fixture
def out(tmp_path: Path) -> FileOutput:
    return FileOutput(tmp_path / "out")


@pytest.fixture
def err(tmp_path: Path) -> FileOutput:
    return FileOutput(tmp_path / "err")


@pytest.fixture
def terminal(tmp_path: Path) -> FileOutput:
    return FileOutput(tmp_path / "terminal", terminal=True)


def test_progress_in_one_line() -> None:
    assert (
        progress(STATUS)
        == "running: version 120, loss 0.4123, 640 samples/s, accuracy 0.5, 7680 samples, workers 1"
    )
    assert progress({**STATUS, "waiting_for": "worker 3"}).endswith("waiting for worker 3")
    assert "loss not finite, 640 samples/s, accuracy 0.5" in progress(
        {**STATUS, "metrics": {"accuracy": 0.5, "loss": None}}
    )
    assert r"'a\nb' 0.5" in progress({**STATUS, "metrics": {"a\nb": 0.5}})
    assert progress({}) == ""


def test_the_current_pass_is_near_the_start_of_the_line() -> None:
    status = {
        **STATUS,
        "progress": {"pass": 2, "passes": 5, "percent": 43.2, "remaining_seconds": 12.4},
    }

    assert progress(status).startswith(
        "running: version 120, pass 2 of 5: 43 %, 12 s left, loss 0.4123, 640 samples/s"
    )


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((1, None, 0.0, None), "pass 1: 0 %"),
        ((1, 3, 99.6, 0.34), "pass 1 of 3: 100 %, 0.3 s left"),
        ((3, 3, 100.0, 0.0), "pass 3 of 3: 100 %"),
        ((2, None, 50.0, 7205.0), "pass 2: 50 %, 2 h 0 m left"),
        ((None, None, None, None), ""),
    ],
)
def test_a_pass_is_shown_with_percentage_and_remaining_time(
    values: tuple[Any, ...], text: str
) -> None:
    keys = ("pass", "passes", "percent", "remaining_seconds")

    assert pass_text(dict(zip(keys, values, strict=True))) == text


def test_a_status_without_progress_shows_none() -> None:
    assert pass_text(None) == pass_text({}) == ""


def test_lines_are_prefixed_with_their_process_on_their_stream(
    out: FileOutput, err: FileOutput
) -> None:
    with closing(open_display(out, err)) as display:
        display.line("w0", "stdout", "result")
        display.line("s0", "stderr", "event")
        display.show_message("hello")

    assert out.text() == "[w0] result\n"
    assert err.text() == "[s0] event\n[run] hello\n"


def test_a_prompt_is_shown_at_once_and_continued_by_its_process(
    out: FileOutput, terminal: FileOutput
) -> None:
    """As a debugger shows it; without progress meanwhile. Another line ends it."""
    display = PlainDisplay(terminal, terminal)

    display.line("w0", "stdout", "(Pdb) ", is_prompt=True)
    assert terminal.text() == "[w0] (Pdb) "
    display.tick(STATUS, 1e9)
    display.line("w0", "stdout", "42")
    display.line("w0", "stdout", "..", is_prompt=True)
    display.line("w0", "stdout", "..", is_prompt=True)
    display.line("s0", "stderr", "event")
    display.line("w0", "stdout", "done")

    assert terminal.text() == "[w0] (Pdb) 42\n[w0] ....\n[s0] event\n[w0] done\n"


def test_the_panel_goes_for_a_prompt_and_returns_below_the_next_lines(
    terminal: FileOutput, out: FileOutput
) -> None:
    console = Console(file=cast(TextIO, terminal), force_terminal=True, color_system=None)
    with closing(LiveDisplay(console, terminal, terminal)) as display:
        display.tick(STATUS, 1.0)
        display.line("w0", "stdout", "(Pdb) ", is_prompt=True)
        before = terminal.text()
        assert before.endswith("[w0] (Pdb) ")
        display.tick(STATUS, 2.0)
        assert terminal.text() == before
        display.line("w0", "stdout", "42")
        display.tick(STATUS, 2.1)
        assert terminal.text() == before + "42\n"
        display.tick(STATUS, 3.0)
        shown = terminal.text()[len(before) :]

    assert "running: version 120" in shown
    assert "\x1b[1A" not in shown  # it moves up over no line of the script


def test_log_lines_of_ps_run_are_prefixed(out: FileOutput, err: FileOutput) -> None:
    LogWriter(PlainDisplay(out, err)).write("one\ntwo\n")

    assert err.text() == "[run] one\n[run] two\n"


def test_without_a_terminal_progress_is_printed_at_intervals(
    out: FileOutput, err: FileOutput
) -> None:
    display = PlainDisplay(out, err)
    later = 1e9
    looks: list[tuple[Status, float]] = [
        ({}, 0),
        (STATUS, LINE_SECONDS),
        ({**STATUS, "version": 121}, LINE_SECONDS + 0.1),
        (STATUS, 2 * LINE_SECONDS),
        ({**STATUS, "version": 122}, 3 * LINE_SECONDS),
    ]

    for status, after in looks:
        display.tick(status, later + after)
        err.finish()

    assert [line.split(",")[0] for line in err.text().splitlines()] == [
        "[run] running: version 120",
        "[run] running: version 122",
    ]


def test_progress_is_skipped_while_the_reader_is_behind(
    out: FileOutput, err: FileOutput, terminal: FileOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Output, "is_behind", True)

    PlainDisplay(out, err).tick(STATUS, 1e9)
    console = Console(file=cast(TextIO, terminal), force_terminal=True)
    with closing(LiveDisplay(console, out, terminal)) as display:
        before = terminal.text()
        display.tick(STATUS, 1.0)
        assert terminal.text() == before

    assert err.text() == ""


def test_a_terminal_shows_a_live_panel_below_the_lines(
    out: FileOutput, terminal: FileOutput
) -> None:
    console = Console(file=cast(TextIO, terminal), force_terminal=True, width=200)

    with closing(LiveDisplay(console, out, terminal)) as display:
        display.tick(STATUS, 1.0)
        display.line("w0", "stderr", "[not] markup " + "x" * 300)
        display.line("w0", "stdout", "result")

    assert "[not] markup " + "x" * 300 in terminal.text().replace("\x1b[0m", "")
    assert "running: version 120" in terminal.text()
    assert out.text() == "[w0] result\n"


@pytest.mark.parametrize(("kind", "display"), [("xterm", LiveDisplay), ("dumb", PlainDisplay)])
def test_open_display_chooses_by_the_terminal(
    out: FileOutput, terminal: FileOutput, monkeypatch: pytest.MonkeyPatch, kind: str, display: type
) -> None:
    monkeypatch.setenv("TERM", kind)

    assert isinstance(open_display(out, terminal), display)
    assert isinstance(open_display(terminal, out), PlainDisplay)


def test_the_panel_has_a_row_for_each_active_worker() -> None:
    console = Console(file=io.StringIO(), width=120, record=True)

    console.print(panel(STATUS))

    text = console.export_text()
    assert text.splitlines()[0].startswith("running: version 120")
    assert "w0" in text
    assert "640 samples/s" in text
    assert "w1" not in text
    assert "compute" in text


def test_the_panel_before_the_first_answer_shows_starting() -> None:
    console = Console(file=io.StringIO(), width=80, record=True)

    console.print(panel({}))

    assert console.export_text().strip() == "starting"
