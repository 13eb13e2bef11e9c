"""Processes and their output: real ones, but tiny."""

import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from psworker.launch import orphan_guard
from psworker.launch.processes import TAIL_LINES, LineSplitter, ManagedProcess

LIMIT = 30.0


class Started:
    """A process that runs a piece of Python, and what it said."""

    def __init__(self, code: str, folder: Path) -> None:
        self.lines: list[tuple[str, str, str]] = []
        self.codes: list[int] = []
        self.said = threading.Event()
        self.log = folder / "w0.log"
        self.process = ManagedProcess(
            "w0",
            [sys.executable, "-I", "-S", "-u", "-c", code],
            {"PATH": os.environ["PATH"]},
            self.log,
            traceback_file=folder / "w0.traceback",
            on_line=self._line,
            on_exit=lambda _, code: self.codes.append(code),
        )

    def _line(self, name: str, stream: str, text: str) -> None:
        self.lines.append((name, stream, text))
        self.said.set()

    def end(self) -> int:
        self.process.join()
        return self.codes[0]


Start = Callable[[str], Started]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts processes that are gone after the test, however it ends."""
    everything: list[Started] = []

    def start_one(code: str) -> Started:
        everything.append(Started(code, tmp_path))
        return everything[-1]

    yield start_one
    for started in everything:
        started.process.kill()
        started.process.join()


def wait_until_gone(pid: int) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([handle], [], [], LIMIT)[0], f"{pid} still runs"
    finally:
        os.close(handle)


def test_lines_of_both_streams_are_told_and_logged(start: Start) -> None:
    code = "import sys; print('one'); print('two', file=sys.stderr); sys.exit(7)"

    started = start(code)

    assert started.end() == 7
    assert sorted(started.lines) == [("w0", "stderr", "two"), ("w0", "stdout", "one")]
    assert sorted(started.log.read_text().split()) == ["one", "two"]


def test_the_tail_holds_the_last_lines(start: Start) -> None:
    started = start("for i in range(50): print(i)")
    started.end()

    assert list(started.process.tail) == [str(number) for number in range(50 - TAIL_LINES, 50)]


def test_a_signal_is_a_negative_code(start: Start) -> None:
    started = start("import os; os.kill(os.getpid(), 9)")

    assert started.end() == -9


def test_terminate_is_sigterm_to_the_process(start: Start) -> None:
    code = (
        "import signal, sys; signal.signal(15, lambda *_: sys.exit(3)); print('up'); signal.pause()"
    )
    started = start(code)
    assert started.said.wait(LIMIT)

    started.process.terminate()

    assert started.end() == 3


def test_kill_takes_everything_along_that_the_process_started(start: Start) -> None:
    code = (
        "import signal, subprocess, sys; signal.signal(15, signal.SIG_IGN);child = "
        "subprocess.Popen([sys.executable, '-I', '-S', '-c', 'import signal; "
        "signal.pause()']);print(child.pid); signal.pause()"
    )
    started = start(code)
    assert started.said.wait(LIMIT)

    started.process.kill()

    assert started.end() == -9
    wait_until_gone(int(started.lines[0][2]))


def test_what_an_ended_process_leaves_behind_is_killed_too(start: Start) -> None:
    code = (
        "import subprocess, sys;child = subprocess.Popen([sys.executable, '-I', '-S', '-c', "
        "'import signal; signal.pause()']);print(child.pid)"
    )
    started = start(code)

    assert started.end() == 0
    wait_until_gone(int(started.lines[0][2]))


def test_killing_what_has_ended_is_harmless(start: Start) -> None:
    started = start("")
    started.end()

    started.process.kill()
    started.process.terminate()

    assert started.codes == [0]


def test_what_the_script_raised_goes_to_the_log_and_is_kept_apart(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "w0.traceback").write_text("Traceback\nValueError: x\n")

    started = start("print('before')")
    started.end()

    assert started.process.traceback == ["Traceback", "ValueError: x"]
    assert started.log.read_text() == "before\nTraceback\nValueError: x\n"
    assert not (tmp_path / "w0.traceback").exists()


@pytest.mark.parametrize(
    ("broken", "why"), [("full", "No space left on device"), ("a folder", "Is a directory")]
)
def test_a_log_that_cannot_be_written_costs_the_log_and_not_the_process(
    start: Start, tmp_path: Path, broken: str, why: str
) -> None:
    path = tmp_path / "w0.log"
    path.symlink_to("/dev/full") if broken == "full" else path.mkdir()

    started = start("import sys; print('one'); print('two', file=sys.stderr); sys.exit(7)")

    assert started.end() == 7
    problem = f"{path} cannot be written: {why}; the process continues without its log"
    assert sorted(text for _, _, text in started.lines) == sorted([problem, "one", "two"])


def test_lines_that_cannot_be_shown_end_the_process_and_are_no_trouble_of_the_log(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda found: raised.append(found.exc_type))
    monkeypatch.setattr(Started, "_line", lambda *_: "→".encode("latin-1"))

    started = start("import signal; print('line', flush=True); signal.pause()")

    assert started.end() == -9
    assert raised == [UnicodeEncodeError]
    assert list(started.process.tail) == ["line"]


PARENT = """
import subprocess, sys, os, signal
arguments = [sys.argv[1], sys.argv[2], str(os.getpid())]
child = subprocess.Popen([sys.executable, "-I", "-S", "-c", *arguments])
signal.pause()
"""
GUARDED = """
import runpy, sys
guard = runpy.run_path(sys.argv[1])
code = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
command = [sys.executable, "-I", "-S", "-c", code]
sys.exit(guard["main"](int(sys.argv[2]), command, watch=WATCH))
"""


@pytest.mark.parametrize("watch", [False, True])
def test_a_tethered_process_ends_with_a_parent_that_is_killed(watch: bool) -> None:
    code = GUARDED.replace("WATCH", str(watch))
    line = [sys.executable, "-I", "-S", "-c", PARENT, code, orphan_guard.__file__]
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())

        parent.kill()

        wait_until_gone(pid)


def test_a_command_whose_parent_is_already_gone_never_starts() -> None:
    line = [
        sys.executable,
        "-I",
        "-S",
        orphan_guard.__file__,
        "1",
        sys.executable,
        "-c",
        "print('started')",
    ]

    result = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT, check=False)

    assert (result.returncode, result.stdout) == (143, "")


class TestLines:
    def test_cut_at_line_ends_wherever_the_chunks_end(self) -> None:
        lines = LineSplitter()

        assert lines.feed(b"on") == []
        assert lines.feed(b"e\ntwo\nth") == ["one", "two"]
        assert lines.flush() == ["th"]
        assert lines.flush() == []

    def test_a_progress_bar_is_its_last_state(self) -> None:
        assert LineSplitter().feed(b"\r 10%\r 55%\r100%\ndone\r\n") == ["100%", "done"]

    def test_bytes_that_are_no_text_do_not_hurt(self) -> None:
        assert LineSplitter().feed(b"\xff\n") == ["\N{REPLACEMENT CHARACTER}"]

    def test_a_line_without_end_comes_in_pieces(self) -> None:
        assert LineSplitter().feed(b"x" * 100_000) == ["x" * 100_000]
