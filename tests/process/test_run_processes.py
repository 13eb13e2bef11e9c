"""Child processes of ps-run and their output, with small real processes."""

import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from psworker.supervision import orphan_guard
from psworker.supervision.processes import TAIL_LINES, LineSplitter, ManagedProcess

LIMIT = 30.0


class OutputRecorder:
    """A process that runs Python code, with its recorded output and exit code."""

    def __init__(self, code: str, folder: Path) -> None:
        self.lines: list[tuple[str, str, str]] = []
        self.codes: list[int] = []
        self.has_output = threading.Event()
        self.log = folder / "w0.log"
        self.process = ManagedProcess(
            "w0",
            [sys.executable, "-I", "-S", "-u", "-c", code],
            {"PATH": os.environ["PATH"]},
            self.log,
            traceback_file=folder / "w0.traceback",
            on_line=self._record_line,
            on_exit=lambda _, code: self.codes.append(code),
        )

    def _record_line(self, name: str, stream: str, text: str) -> None:
        self.lines.append((name, stream, text))
        self.has_output.set()

    def join(self) -> int:
        self.process.join()
        return self.codes[0]


Start = Callable[[str], OutputRecorder]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Yield a function that starts processes; kill them after the test."""
    recorders: list[OutputRecorder] = []

    def start_process(code: str) -> OutputRecorder:
        recorders.append(OutputRecorder(code, tmp_path))
        return recorders[-1]

    yield start_process
    for recorder in recorders:
        recorder.process.kill()
        recorder.process.join()


def wait_for_exit(pid: int) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([handle], [], [], LIMIT)[0], f"{pid} still runs"
    finally:
        os.close(handle)


def test_lines_of_both_streams_are_reported_and_logged(start: Start) -> None:
    code = "import sys; print('one'); print('two', file=sys.stderr); sys.exit(7)"

    recorder = start(code)

    assert recorder.join() == 7
    assert sorted(recorder.lines) == [("w0", "stderr", "two"), ("w0", "stdout", "one")]
    assert sorted(recorder.log.read_text().split()) == ["one", "two"]


def test_the_tail_contains_the_last_lines(start: Start) -> None:
    recorder = start("for i in range(50): print(i)")
    recorder.join()

    assert list(recorder.process.tail) == [str(number) for number in range(50 - TAIL_LINES, 50)]


def test_a_killed_process_has_a_negative_exit_code(start: Start) -> None:
    recorder = start("import os; os.kill(os.getpid(), 9)")

    assert recorder.join() == -9


def test_terminate_sends_sigterm(start: Start) -> None:
    code = (
        "import signal, sys; signal.signal(15, lambda *_: sys.exit(3)); print('up'); signal.pause()"
    )
    recorder = start(code)
    assert recorder.has_output.wait(LIMIT)

    recorder.process.terminate()

    assert recorder.join() == 3


def test_kill_also_kills_child_processes(start: Start) -> None:
    code = (
        "import signal, subprocess, sys; signal.signal(15, signal.SIG_IGN);child = "
        "subprocess.Popen([sys.executable, '-I', '-S', '-c', 'import signal; "
        "signal.pause()']);print(child.pid); signal.pause()"
    )
    recorder = start(code)
    assert recorder.has_output.wait(LIMIT)

    recorder.process.kill()

    assert recorder.join() == -9
    wait_for_exit(int(recorder.lines[0][2]))


def test_children_of_an_exited_process_are_killed(start: Start) -> None:
    code = (
        "import subprocess, sys;child = subprocess.Popen([sys.executable, '-I', '-S', '-c', "
        "'import signal; signal.pause()']);print(child.pid)"
    )
    recorder = start(code)

    assert recorder.join() == 0
    wait_for_exit(int(recorder.lines[0][2]))


def test_killing_an_exited_process_has_no_effect(start: Start) -> None:
    recorder = start("")
    recorder.join()

    recorder.process.kill()
    recorder.process.terminate()

    assert recorder.codes == [0]


def test_a_script_traceback_is_logged_and_available_separately(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "w0.traceback").write_text("Traceback\nValueError: x\n")

    recorder = start("print('before')")
    recorder.join()

    assert recorder.process.traceback == ["Traceback", "ValueError: x"]
    assert recorder.log.read_text() == "before\nTraceback\nValueError: x\n"
    assert not (tmp_path / "w0.traceback").exists()


@pytest.mark.parametrize(
    ("broken", "why"), [("full", "No space left on device"), ("a folder", "Is a directory")]
)
def test_a_process_continues_without_a_log_that_cannot_be_written(
    start: Start, tmp_path: Path, broken: str, why: str
) -> None:
    path = tmp_path / "w0.log"
    path.symlink_to("/dev/full") if broken == "full" else path.mkdir()

    recorder = start("import sys; print('one'); print('two', file=sys.stderr); sys.exit(7)")

    assert recorder.join() == 7
    problem = f"{path} cannot be written: {why}; the process continues without its log"
    assert sorted(text for _, _, text in recorder.lines) == sorted([problem, "one", "two"])


def test_an_error_in_the_line_handler_kills_the_process(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda found: raised.append(found.exc_type))
    monkeypatch.setattr(OutputRecorder, "_record_line", lambda *_: "→".encode("latin-1"))

    recorder = start("import signal; print('line', flush=True); signal.pause()")

    assert recorder.join() == -9
    assert raised == [UnicodeEncodeError]
    assert list(recorder.process.tail) == ["line"]


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
def test_a_guarded_process_exits_when_its_parent_is_killed(watch: bool) -> None:
    code = GUARDED.replace("WATCH", str(watch))
    line = [sys.executable, "-I", "-S", "-c", PARENT, code, orphan_guard.__file__]
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())

        parent.kill()

        wait_for_exit(pid)


def test_a_command_whose_parent_has_exited_never_starts() -> None:
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


class TestLineSplitter:
    def test_lines_are_split_independently_of_chunks(self) -> None:
        lines = LineSplitter()

        assert lines.feed(b"on") == []
        assert lines.feed(b"e\ntwo\nth") == ["one", "two"]
        assert lines.flush() == ["th"]
        assert lines.flush() == []

    def test_a_progress_bar_is_reduced_to_its_last_state(self) -> None:
        assert LineSplitter().feed(b"\r 10%\r 55%\r100%\ndone\r\n") == ["100%", "done"]

    def test_a_prompt_is_taken_once_and_a_progress_bar_is_none(self) -> None:
        lines = LineSplitter()

        lines.feed(b"one\n(Pdb) ")
        assert (lines.take_prompt(), lines.take_prompt()) == ("(Pdb) ", "")
        assert lines.feed(b"42\n") == ["42"]
        lines.feed(b"\r 10%")
        assert lines.take_prompt() == ""
        assert lines.feed(b"\r 20%\n") == [" 20%"]

    def test_invalid_utf8_is_replaced(self) -> None:
        assert LineSplitter().feed(b"\xff\n") == ["\N{REPLACEMENT CHARACTER}"]

    def test_a_long_line_without_newline_is_split(self) -> None:
        assert LineSplitter().feed(b"x" * 100_000) == ["x" * 100_000]
