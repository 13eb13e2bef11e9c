"""Runs that count no training step."""

import json
from collections.abc import Iterator

import pytest

from tests.support.programs import Programs, programs_in


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    with programs_in(tmp_path_factory.mktemp("idle")) as programs:
        yield programs


def test_a_run_fails_if_no_script_joins(programs: Programs) -> None:
    programs.script("print('no job')")

    run = programs.start(
        "ps-run", "--servers", 2, "--workers", 2, "--summary", "idle.json", "train.py"
    )

    assert run.wait() == 16
    assert "call psworker.connect()" in run.err
    assert "remedy: call psworker.connect(), job.optimizer(...) and step()" in run.err
    found = json.loads((programs.folder / "idle.json").read_text())
    assert (found["status"], found["error"]["exit_code"], found["error"]["process"]) == (
        "failed",
        16,
        None,
    )


def test_allow_idle_accepts_a_script_that_never_joins(programs: Programs) -> None:
    programs.script("print('no job')")

    run = programs.start("ps-run", "--allow-idle", "train.py")

    assert run.wait() == 0
    assert "call psworker.connect()" in run.err


FORGETS_TO_STEP = """
import torch, psworker
job = psworker.connect()
model = torch.nn.Linear(1, 1)
local = torch.optim.SGD(model.parameters(), lr=0.1)
job.optimizer(local, model)
for (x,) in job.batches((torch.ones(8, 1),), batch_size=2):
    model(x).sum().backward()
job.close()
"""


def test_a_run_fails_if_a_script_never_steps(programs: Programs) -> None:
    programs.script(FORGETS_TO_STEP)

    run = programs.run("ps-run", "train.py")

    assert run.wait() == 16
    assert (
        "no step was counted, and data is left. Try: call step() of the optimizer that "
        "job.optimizer" in run.err
    )
