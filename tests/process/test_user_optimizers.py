"""--optimizers MODULE: user-defined optimizers on real servers and workers.

The module is the example in docs/optimizers.md.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.programs import Program, Programs, programs_in
from tests.support.settings_coverage import run_setting, server_setting, worker_setting
from tests.support.workers import until

DOCS = Path(__file__).parents[2] / "docs" / "optimizers.md"

TRAIN = """
import json, sys, torch, psworker
from my_optimizers import MySignum

torch.manual_seed(1)
model = torch.nn.Linear(40, 3)
data = torch.utils.data.TensorDataset(torch.randn(64, 40), torch.randn(64, 3))
with psworker.connect() as job:
    optimizer = job.optimizer(MySignum(model.parameters(), lr=0.01, momentum=0.8), model)
    for x, y in job.batches(data, batch_size=8, epochs=int(sys.argv[1]), shuffle=True, seed=3):
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
print("weights", json.dumps([p.detach().flatten().tolist() for p in model.parameters()]))
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    with programs_in(tmp_path_factory.mktemp("optimizers")) as programs:
        code = re.search(r'```python\n(""".*?)```', DOCS.read_text(), re.DOTALL)
        assert code is not None
        programs.script(code[1], "my_optimizers.py")
        programs.script(TRAIN)
        yield programs


def weights(program: Program) -> list[list[float]]:
    line = next(line for line in program.out.splitlines() if "weights [" in line)
    found: list[list[float]] = json.loads(line.partition("weights ")[2])
    return found


@server_setting("optimizers")
@worker_setting("optimizers")
@run_setting("optimizers")
def test_two_servers_compute_the_same_weights_as_one_process(programs: Programs) -> None:
    alone = programs.run("ps-worker", "--optimizers", "my_optimizers", "train.py", 2, PS_LOCAL=1)
    run = programs.run("ps-run", "--servers", 2, "--optimizers", "my_optimizers", "train.py", 2)

    assert (alone.wait(), run.wait()) == (0, 0), run.output + alone.output
    for ours, theirs in zip(weights(run), weights(alone), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)


def test_resuming_needs_the_module_and_export_does_not(programs: Programs) -> None:
    """A snapshot contains the optimizer's name. A server without the module names the missing
    optimizer and changes no file.
    """
    flags = ("--data-dir", "job", "--resume", "auto")
    first = programs.run(
        "ps-run", "--servers", 2, *flags, "train.py", 2, PS_OPTIMIZERS="my_optimizers"
    )
    lacking = programs.run("ps-server", "--bind", "127.0.0.1:0", *flags)
    export = programs.run("ps-ctl", "snapshot", "export", "job", "model.safetensors")
    again = programs.start(
        "ps-server", "--bind", "127.0.0.1:0", "--optimizers", "my_optimizers", *flags
    )
    again.wait_for("listening")
    again.end()

    assert first.wait() == 0, first.output
    assert lacking.wait() == 2, lacking.output
    assert "UNSUPPORTED_OPTIMIZER" in lacking.err
    assert "start every ps-server with `--optimizers MODULE`" in lacking.err
    assert export.wait() == 0, export.output
    assert (programs.folder / "model.safetensors").exists()
    assert not list((programs.folder / "job").glob("snapshots/*aside*"))


def test_a_worker_is_refused_if_servers_lack_its_optimizer(programs: Programs) -> None:
    run = programs.run("ps-run", "train.py", 1)

    assert run.wait() == 2, run.output
    assert "UNSUPPORTED_OPTIMIZER" in run.output
    assert "start every ps-server with `--optimizers MODULE`" in run.output


@pytest.mark.parametrize(
    ("command", "rest", "environment"),
    [
        ("ps-server", ("--bind", "127.0.0.1:0"), {}),
        ("ps-worker", ("train.py", "1"), {"PS_LOCAL": 1}),
        ("ps-run", ("train.py", "1"), {}),
    ],
)
def test_a_missing_optimizer_module_is_a_usage_error(
    programs: Programs, command: str, rest: tuple[str, ...], environment: dict[str, object]
) -> None:
    program = programs.run(command, "--optimizers", "their_optimizers", *rest, **environment)
    path = programs.run(command, "--optimizers", "my_optimizers.py", *rest, **environment)

    assert (program.wait(), path.wait()) == (2, 2)
    assert "there is no module their_optimizers. Try: " in program.err
    assert "'my_optimizers.py' is not a module name. Try: package.module, without .py" in path.err


@pytest.mark.parametrize("standby", [False, True])
def test_servers_with_different_optimizer_modules_are_refused(
    programs: Programs, standby: bool
) -> None:
    """A shard or a standby lacks a module that shard 0 has."""
    port = programs.folder / f"port-{standby}"
    shards = 1 if standby else 2
    own = ("--bind", "127.0.0.1:0", "--port-file", port, "--shard", f"0/{shards}")
    first = programs.start("ps-server", *own, "--optimizers", "my_optimizers")
    number = until(lambda: port.exists() and port.read_text().strip(), "a port", seconds=60)
    address = f"127.0.0.1:{number}"
    place = ("--standby-of", address) if standby else ("--shard", "1/2", "--join", address)
    other = programs.run("ps-server", "--bind", "127.0.0.1:0", *place)
    first.end()

    assert other.wait() == 11, other.output
    assert "SHARD_MISMATCH" in other.err
    assert "have different `--optimizers`: " in other.err
    assert "Try: start every server with the same module" in other.err
