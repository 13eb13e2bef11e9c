"""In a worker the root logger and `warnings` belong to the script, as under plain Python."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.programs import Programs, programs_in

# It logs to a file, as many scripts do; a library has a handler of its own, like Lightning's.
SCRIPT = """
import json, logging, os, sys, warnings
shown, found = warnings.showwarning, list(logging.getLogger().handlers)
import torch, psworker

library = logging.getLogger("library")
library.addHandler(logging.StreamHandler(sys.stdout))
library.setLevel("INFO")
logging.basicConfig(
    filename=f"train{os.environ.get('PS_WORKER_RANK', '')}.log", level="INFO", format="%(message)s"
)
untouched = warnings.showwarning.__module__ == "warnings" and warnings.showwarning is shown
print("start", json.dumps({"handlers": len(found), "warnings_untouched": untouched}))

torch.manual_seed(0)
model = torch.nn.Linear(6, 1)
with psworker.connect() as job:
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    for step, (x,) in enumerate(job.batches((torch.randn(40, 6),), batch_size=10)):
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
        logging.info("step %d", step)
library.info("a line of a library")
"""
STEPS = [f"step {number}" for number in range(4)]


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with programs_in(tmp_path) as programs:
        programs.script(SCRIPT)
        yield programs


def steps_in(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.startswith("step")]


@pytest.mark.parametrize("command", ["python", "ps-worker"])
def test_the_script_configures_its_logging(programs: Programs, command: str) -> None:
    run = programs.run(command, "train.py", PS_LOCAL=1)

    assert run.wait() == 0, run.output
    start = next(line for line in run.out.splitlines() if line.startswith("start"))
    assert json.loads(start[len("start ") :]) == {"handlers": 0, "warnings_untouched": True}
    assert steps_in(programs.folder / "train.log") == STEPS
    assert run.out.count("a line of a library") == 1
    assert "a line of a library" not in run.err


def test_the_log_level_of_ps_run_does_not_hide_lines_of_the_script(programs: Programs) -> None:
    run = programs.run(
        "ps-run", "--workers", 1, "--device", "cpu", "--log-level", "warning", "train.py"
    )

    assert run.wait() == 0, run.output
    assert steps_in(programs.folder / "train0.log") == STEPS
    assert run.out.count("a line of a library") == 1
