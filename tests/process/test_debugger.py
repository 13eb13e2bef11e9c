"""`breakpoint()` and `input()` under ps-run on a terminal: a pseudo-terminal is its keyboard."""

import os
import pty
import re
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

LIMIT = 60.0
PS_RUN = Path(sys.executable).parent / "ps-run"
CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")

SCRIPT = """
import psworker, torch

model = torch.nn.Linear(2, 1)
with psworker.connect() as job:
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for (x,) in job.batches((torch.ones(4, 2),), batch_size=2):
        model(x).sum().backward()
        optimizer.step()
        if job.stats.steps == 1:
            secret = 6 * 7
            breakpoint()
            print("has", secret)
    print("answer", input("go on? "))
print("done", job.version)
"""


class Terminal:
    """ps-run in a session of its own whose terminal this test reads and writes."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.text = ""
        self._seen = 0
        (folder / "train.py").write_text(SCRIPT)
        line = [str(PS_RUN), "--device", "cpu", *arguments, "train.py"]
        environment = {key: value for key, value in os.environ.items() if key[:3] != "PS_"}
        environment |= {"TMPDIR": str(folder), "TERM": "xterm", "NO_COLOR": "1"}
        self.pid, self._file = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execve(line[0], line, environment)

    def wait_for(self, text: str) -> str:
        """Return the output up to this text, after the text of the last call."""
        deadline = time.monotonic() + LIMIT
        while text not in (new := CONTROL.sub("", self.text)[self._seen :]):
            assert select.select([self._file], [], [], max(0.0, deadline - time.monotonic()))[0], (
                f"no {text!r} in:\n{new}"
            )
            self.text += os.read(self._file, 1 << 16).decode()
        end = new.index(text) + len(text)
        self._seen += end
        return new[:end]

    def enter(self, line: str) -> None:
        os.write(self._file, f"{line}\n".encode())

    def press_ctrl_c(self) -> None:
        os.write(self._file, b"\x03")

    def exit_code(self) -> int:
        with suppress(OSError):  # EIO: all its processes have closed the terminal
            while data := os.read(self._file, 1 << 16):
                self.text += data.decode()
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.pid = 0
        return code

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._file)


@pytest.fixture
def terminal(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path, "--workers", str(request.param))
    yield terminal
    terminal.close()


@pytest.mark.parametrize("terminal", [1], indirect=True)
def test_the_only_worker_can_be_debugged(terminal: Terminal) -> None:
    """A prompt appears before its line is complete, and the panel leaves it alone."""
    terminal.wait_for("(Pdb) ")
    terminal.enter("p secret")
    assert terminal.wait_for("(Pdb) ").replace("\r", "").startswith("p secret\n42\n")
    terminal.enter("secret = 43")
    terminal.wait_for("(Pdb) ")
    terminal.enter("continue")
    terminal.wait_for("has 43")
    terminal.wait_for("go on? ")
    terminal.enter("yes")
    terminal.wait_for("answer yes")
    terminal.wait_for("done 2")

    assert terminal.exit_code() == 0, terminal.text


@pytest.mark.parametrize("terminal", [1], indirect=True)
def test_ctrl_c_in_the_debugger_ends_the_run(terminal: Terminal) -> None:
    """The debugger does not get it; a second one kills the worker, which waits for input."""
    terminal.wait_for("(Pdb) ")
    terminal.press_ctrl_c()
    terminal.wait_for("a second signal kills them")
    terminal.press_ctrl_c()

    assert terminal.exit_code() == 130, terminal.text


@pytest.mark.parametrize("terminal", [2], indirect=True)
def test_several_workers_do_not_read_the_terminal(terminal: Terminal) -> None:
    terminal.wait_for("BdbQuit")

    assert terminal.exit_code() == 1
