"""`ps-ctl suggest batch` without processes: what a trial says, what is refused, what is printed."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from psworker.core.batch_search import BatchTry
from psworker.ctl import suggest
from psworker.ctl.cli import main
from psworker.ctl.suggest import Trial
from psworker.session.batch_trial import TrialOrder, TrialResult
from psworker.supervision.script import Script

Output = pytest.CaptureFixture[str]
Trials = Callable[[Callable[[int], Trial]], list[TrialOrder]]

OWN = 32
STEPS = 3
MEASURED = TrialResult(
    batch_sizes=(OWN,), length=100, optimizers=(("", "sgd", (0.5, 0.25)),), device="cpu"
)


def trial(size: int, seconds: float = 1.0, code: int = 0, *output: str) -> Trial:
    """Return a complete trial, or a failed one if there is an exit code."""
    steps = 0 if code else STEPS
    return Trial(
        code,
        MEASURED._replace(
            steps=steps, seconds=(seconds,) * steps, samples=(size,) * steps, memory=1 << 30
        ),
        [*output],
    )


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Trials:
    """Return a function that replaces the processes by trials of batch sizes."""

    def replace(result: Callable[[int], Trial]) -> list[TrialOrder]:
        orders = []

        def run(script: Script, order: TrialOrder, folder: Path) -> Trial:
            orders.append(order)
            return result(order.batch_size or OWN)

        monkeypatch.setattr(suggest, "run_script", run)
        return orders

    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    return replace


def refusal(capsys: Output) -> str:
    assert main(["suggest", "batch", "--steps", str(STEPS), "train.py"]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    return printed.err


# ---- one trial -----------------------------------------------------------------------------------


def test_the_speed_is_that_of_all_timed_steps() -> None:
    result = TrialResult(seconds=(1.0, 4.0, 1.0, 2.0), samples=(8, 8, 8, 2), memory=5)

    assert Trial(0, result, []).as_try(8, 4) == BatchTry(8, 26 / 8, 2.0, 5, None)


@pytest.mark.parametrize(
    ("code", "output"),
    [
        (-signal.SIGKILL, []),
        (1, ["MemoryError"]),
        (1, ["numpy._core._exceptions._ArrayMemoryError: Unable to allocate 9 GiB"]),
        (1, ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB", "more"]),
        (1, ["RuntimeError: DataLoader worker (pid 3) is killed by signal: Killed. "]),
        (-signal.SIGABRT, ["terminate called after throwing an instance of 'std::bad_alloc'"]),
    ],
)
def test_memory_that_ends_is_known(code: int, output: list[str]) -> None:
    tried = Trial(code, TrialResult(), output).as_try(8, 5)

    assert tried.is_out_of_memory
    assert tried.problem == "ran out of memory"


@pytest.mark.parametrize(
    ("code", "output", "problem"),
    [
        (1, ["ValueError: bad"], "failed with exit code 1"),
        (-signal.SIGSEGV, [], "failed with signal 11"),
        (0, ["MemoryError"], "ended after 2 of 10 steps"),
    ],
)
def test_other_ends_are_no_lack_of_memory(code: int, output: list[str], problem: str) -> None:
    tried = Trial(code, TrialResult(steps=2, seconds=(1.0,)), output).as_try(8, 5)

    assert not tried.is_out_of_memory
    assert tried.problem == problem


# ---- a search ------------------------------------------------------------------------------------


def test_trials_replace_the_own_batch_size(trials: Trials, capsys: Output) -> None:
    orders = trials(trial)

    assert main(["suggest", "batch", "--max", "80", "--steps", str(STEPS), "train.py", "-x"]) == 0

    assert [(each.replaces, each.batch_size) for each in orders] == [
        (0, 0),
        (OWN, 8),
        (OWN, 16),
        (OWN, 64),
    ]
    assert {each.steps for each in orders} == {STEPS}
    assert len({each.file for each in orders}) == 1
    assert not Path(orders[0].file).parent.exists()
    assert capsys.readouterr().err.splitlines() == [
        "train.py as it is: batch size 32, 32 samples/s, 1 s a step, 1.07 GB",
        "batch size 8: 8 samples/s, 1 s a step, 1.07 GB",
        "batch size 16: 16 samples/s, 1 s a step, 1.07 GB",
        "batch size 64: 64 samples/s, 1 s a step, 1.07 GB",
    ]


def test_the_tables(trials: Trials, capsys: Output) -> None:
    trials(lambda size: trial(size, 0.1) if size < 64 else trial(size, 0, -signal.SIGKILL))

    assert main(["suggest", "batch", "--steps", str(STEPS), "train.py"]) == 0

    assert capsys.readouterr().out.splitlines() == [
        "train.py on cpu",
        "batch size  samples/s  step    memory",
        "8           80         100 ms  1.07 GB",
        "16          160        100 ms  1.07 GB",
        "32          320        100 ms  1.07 GB  yours, knee",
        "64                                      ran out of memory",
        "",
        "end of the search  memory is too small for larger batches",
        "",
        "Learning rate at the knee, 32",
        "optimizer  rule    factor  rate at 32  rate at 32",
        "sgd        linear  1       0.5, 0.25   0.5, 0.25",
    ]


@pytest.mark.parametrize("options", [["--output", "json"], ["--max", "5000"]])
def test_the_document(
    trials: Trials, capsys: Output, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trials(trial)
    monkeypatch.setenv("PS_OUTPUT", "json")

    assert main(["suggest", "batch", "--steps", str(STEPS), *options, "train.py"]) == 0

    document = json.loads(capsys.readouterr().out)
    assert document.pop("tries")[0] == {
        "batch_size": 8,
        "samples_per_second": 8.0,
        "step_seconds": 1.0,
        "memory": 1 << 30,
        "gpu_memory": None,
        "problem": "",
        "is_out_of_memory": False,
    }
    assert document == {
        "script": "train.py",
        "device": "cpu",
        "batch_size": OWN,
        "knee": 64,
        "ended": "the data set has 100 samples",
        "optimizers": [
            {
                "name": "",
                "optimizer": "sgd",
                "rule": "linear",
                "factor": 2.0,
                "learning_rates": [0.5, 0.25],
                "learning_rates_at_knee": [1.0, 0.5],
            }
        ],
    }


def test_the_own_batch_size_may_be_too_large(trials: Trials, capsys: Output) -> None:
    trials(lambda size: trial(size, 1.0, 0 if size < OWN else -signal.SIGKILL))

    assert main(["suggest", "batch", "--steps", str(STEPS), "train.py"]) == 0
    assert "16          16         1 s   1.07 GB  knee" in capsys.readouterr().out


# ---- refusals ------------------------------------------------------------------------------------


def test_a_search_without_a_result_is_refused(trials: Trials, capsys: Output) -> None:
    trials(lambda size: trial(size, 1.0, -signal.SIGKILL))

    assert "no batch size works: memory is too small" in refusal(capsys)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((), "it makes no training pass over job.batches"),
        ((0,), "a batch_sampler of train.py decides"),
        ((32, 8), "several: 32, 8"),
    ],
)
def test_scripts_whose_batch_size_cannot_be_replaced_are_refused(
    trials: Trials, capsys: Output, sizes: tuple[int, ...], words: str
) -> None:
    complete = trial(OWN)
    trials(lambda _: complete._replace(result=complete.result._replace(batch_sizes=sizes)))

    assert words in refusal(capsys)


def test_a_failing_script_shows_the_end_of_its_output(trials: Trials, capsys: Output) -> None:
    orders = trials(lambda size: trial(size, 1.0, 3, "first", "last"))

    assert "failed with exit code 3\n  first\n  last\n" in refusal(capsys)
    assert not Path(orders[0].file).parent.exists()


def test_memory_that_ends_before_the_first_pass_is_an_error(trials: Trials, capsys: Output) -> None:
    trials(lambda size: Trial(1, TrialResult(), ["MemoryError"]))

    assert "cannot measure train.py: it ran out of memory" in refusal(capsys)


def test_a_missing_script_is_refused_before_it_starts(trials: Trials, capsys: Output) -> None:
    orders = trials(trial)
    os.unlink("train.py")

    assert "there is no such script" in refusal(capsys)
    assert not orders
