"""`breakpoint()` and `input()` under ps-run on a terminal: a pseudo-terminal is its keyboard."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.terminal import Terminal

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


@pytest.fixture
def terminal(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Terminal]:
    (tmp_path / "train.py").write_text(SCRIPT)
    line = ("ps-run", "--device", "cpu", "--workers", str(request.param), "train.py")
    with closing(Terminal(tmp_path, *line)) as terminal:
        yield terminal


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
