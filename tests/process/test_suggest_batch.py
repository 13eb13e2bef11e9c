"""`ps-ctl suggest batch` runs scripts with several batch sizes, and leaves nothing behind."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import Program, Programs, programs_in, wait_for_exit
from tests.support.workers import until

# The extra code of a test sees the number of rows of a batch as `n`.
SCRIPT = """
import os, signal, types
import psworker, torch
from psworker.session import batch_trial
from torch import nn

now = 0.0

data = torch.ones(1000, 1)
model = nn.Linear(1, 1)
with psworker.connect() as job:
    optimizer = job.optimizer(torch.optim.{optimizer}, model)
    for epoch in range({epochs}):
        for batch in job.batches(data, batch_size=32{loader}):
            n = len(batch)
            {code}
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
    job.save("model.safetensors")
"""

# by the clock of the trial a step takes 1 s, and from 64 rows on in proportion to them
KNEE_AT_64 = """batch_trial.time = types.SimpleNamespace(perf_counter=lambda: now)
now += max(1, n / 64)"""


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with programs_in(tmp_path) as programs:
        yield programs
        left = [path for path in programs.temporary.iterdir() if path.name.startswith("ps-suggest")]
        assert not left
        assert not programs.alive


def write(
    programs: Programs,
    code: str = "",
    optimizer: str = "SGD(model.parameters(), lr=0.125)",
    epochs: int = 1,
    loader: str = "",
) -> Path:
    code = code.replace("\n", "\n" + 12 * " ")
    return programs.script(
        SCRIPT.format(code=code, optimizer=optimizer, epochs=epochs, loader=loader)
    )


def suggest(programs: Programs, *args: object, steps: int = 2, **environment: str) -> Program:
    line = ("suggest", "batch", "--steps", steps, "--output", "json", *args, "train.py")
    return programs.run("ps-ctl", *line, **environment)


def found(program: Program) -> Any:
    assert program.process.returncode == 0, program.output
    return json.loads(program.out)


def test_the_knee_and_the_learning_rate_there(programs: Programs) -> None:
    code = 'print("chatty")\nassert open("/proc/self/oom_score_adj").read() == "1000\\n"\n'
    write(programs, code + KNEE_AT_64, "AdamW(model.parameters(), lr=0.125)")
    saved = programs.folder / "model.safetensors"
    saved.write_text("weights")

    program = suggest(programs, "--start", 16)

    document = found(program)
    rates = {each["batch_size"]: each["samples_per_second"] for each in document["tries"]}
    assert rates == {16: 16, 32: 32, 64: 64, 128: 64, 256: 64}
    assert {each["batch_size"]: each["step_seconds"] for each in document["tries"]}[128] == 2
    assert document["ended"] == "larger batches are no faster"
    assert document["batch_size"] == 32
    assert document["knee"] == 64
    assert document["optimizers"] == [
        {
            "name": "",
            "optimizer": "adamw",
            "rule": "square root",
            "factor": pytest.approx(2**0.5),
            "learning_rates": [0.125],
            "learning_rates_at_knee": [pytest.approx(0.125 * 2**0.5)],
        }
    ]
    assert all(each["memory"] > 50 << 20 for each in document["tries"])
    assert program.err.startswith("train.py as it is: batch size 32, ")
    assert program.err.count("samples/s") == 5
    assert "chatty" not in program.output
    assert saved.read_text() == "weights"


@pytest.mark.parametrize(
    "code",
    [
        "raise MemoryError",
        "os.kill(os.getpid(), signal.SIGKILL)",
        "torch.empty(1 << 46)",
    ],
)
def test_the_search_ends_where_memory_ends(programs: Programs, code: str) -> None:
    write(programs, f"if n > 32: {code}")

    document = found(suggest(programs, "--start", 16))

    problems = {each["batch_size"]: each["problem"] for each in document["tries"]}
    assert problems == {16: "", 32: "", 64: "ran out of memory"}
    assert document["ended"] == "memory is too small for larger batches"


def test_smaller_batches_are_tried_if_memory_is_too_small_for_the_own(programs: Programs) -> None:
    write(programs, "if n > 16: raise MemoryError")

    document = found(suggest(programs))

    assert [each["batch_size"] for each in document["tries"]] == [8, 16, 32]
    assert document["knee"] in (8, 16)


def test_processes_of_a_loader_run_out_of_memory(programs: Programs) -> None:
    data = """
import os, signal
class Rows:
    def __len__(self): return 1000
    def __getitem__(self, index): raise AssertionError
    def __getitems__(self, indices):
        if len(indices) > 32:
            os.kill(os.getpid(), signal.SIGKILL)
        return [torch.ones(1) for _ in indices]
"""
    script = write(programs, loader=", num_workers=2")
    code = script.read_text().replace("data = torch.ones(1000, 1)", data + "\ndata = Rows()")
    script.write_text(code)

    document = found(suggest(programs, "--start", 32))

    assert [each["problem"] for each in document["tries"]] == ["", "ran out of memory"]


def test_each_of_several_optimizers_has_its_rule(programs: Programs) -> None:
    programs.script("""
import psworker, torch
from torch import nn

nets = {name: nn.Linear(1, 1) for name in "dgh"}
with psworker.connect() as job:
    groups = [{"params": [nets["d"].weight], "lr": 0.5}, {"params": [nets["d"].bias], "lr": 0.25}]
    steps = [
        job.optimizer(torch.optim.SGD(groups), nets["d"], name="d"),
        job.optimizer(torch.optim.RMSprop(nets["g"].parameters(), lr=0.5), nets["g"], name="g"),
        job.optimizer(psworker.Lion(nets["h"].parameters(), lr=0.5), nets["h"], name="h"),
    ]
    for batch in job.batches(torch.ones(64, 1), batch_size=4):
        sum(net(batch).sum() for net in nets.values()).backward()
        for each in steps:
            each.step()
""")

    program = programs.run(
        "ps-ctl", "suggest", "batch", "--start", 16, "--max", 16, "--steps", 1, "train.py"
    )

    assert program.process.returncode == 0, program.output
    table = [line.split() for line in program.out.splitlines()]
    knee = next(row for row in table if "knee" in row)[0]
    rows = {row[0]: row[1:] for row in table if row and row[0] in ("d", "g", "h")}
    d_rates, g_rate, (d_factor, g_factor) = {
        "4": (["0.5,", "0.25"], "0.5", "11"),
        "16": (["2,", "1"], "1", "42"),
    }[knee]
    assert rows == {
        "d": ["sgd", "linear", d_factor, "0.5,", "0.25", *d_rates],
        "g": ["rmsprop", "square", "root", g_factor, "0.5", g_rate],
        "h": ["lion", "none", "is", "known", "0.5"],
    }


def test_a_failing_script_shows_its_error(programs: Programs) -> None:
    write(programs, 'print("my last words")\nraise ValueError("bad rows")')

    program = suggest(programs)

    assert program.process.returncode == 2
    assert not program.out
    assert "my last words" in program.err
    assert "ValueError: bad rows" in program.err
    assert "cannot measure train.py: it failed with exit code 1" in program.err


def test_a_failure_with_a_larger_batch_shows_its_error_and_ends_the_search(
    programs: Programs,
) -> None:
    write(programs, 'if n > 32: raise ValueError("bad rows")')

    program = suggest(programs, "--start", 32)

    assert [each["problem"] for each in found(program)["tries"]] == ["", "failed with exit code 1"]
    assert "ValueError: bad rows" in program.err


def test_a_script_that_ends_too_early_is_refused(programs: Programs) -> None:
    write(programs, "if epoch == 0 and job.stats.steps == 6: break")

    program = suggest(programs)

    assert program.process.returncode == 2
    assert "it ended after 6 of 7 steps" in program.err


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_signals_end_the_script_and_its_processes(
    programs: Programs, number: signal.Signals, code: int
) -> None:
    write(
        programs,
        'open("pid", "w").write(str(os.getpid()))\nsignal.pause()',
        loader=", num_workers=1",
    )
    os.mkfifo(programs.folder / "pid")
    program = programs.start("ps-ctl", "suggest", "batch", "train.py")
    pid = int((programs.folder / "pid").read_text())
    assert pid in programs.alive

    program.send(number)

    assert program.wait() == code
    assert wait_for_exit(pid)
    until(lambda: not programs.alive, "all processes have ended")
    if number == signal.SIGKILL:  # only then its folder stays
        for folder in programs.temporary.glob("ps-suggest-*"):
            shutil.rmtree(folder)
