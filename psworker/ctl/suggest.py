"""`ps-ctl suggest batch`: run a script with one batch size after another, and compare them."""

import json
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Never

import click

from pscommon.core.errors import InvalidRequestError
from pscommon.core.exit_codes import ExitCode
from pscommon.system import signals
from pscommon.system.process_limits import usable_memory
from psworker.core.batch_search import (
    RULES,
    BatchTry,
    Limits,
    find_knee,
    first_size,
    next_size,
    scale_factor,
)
from psworker.ctl.context import CommandContext, pass_settings
from psworker.ctl.output import Table, duration, number, show, size
from psworker.session.batch_trial import (
    TRIAL_VARIABLE,
    WARM_UP_COUNT,
    TrialOrder,
    TrialResult,
)
from psworker.supervision.plan import WORKER
from psworker.supervision.processes import ManagedProcess, Process
from psworker.supervision.script import TRACEBACK_FILE, Script

NOT_FOR_TRIALS = ("PS_PS", "PS_SERVERS", "PS_METRICS_BIND")
"""Variables of a job, which a script without servers refuses or does not need."""

WORDS_OF_MEMORY = (
    "MemoryError",
    "OutOfMemoryError",
    "out of memory",
    "can't allocate memory",
    "Cannot allocate memory",
    "bad_alloc",
    "is killed by signal: Killed",
)
"""What errors say where memory ends: of Python, torch, CUDA, C++, and a DataLoader's process."""

OUT_OF_MEMORY = "ran out of memory"


@click.group(epilog="\b\nExample:\n  ps-ctl suggest batch train.py --epochs 3")
def suggest() -> None:
    """Measure a training script, and suggest settings."""


@suggest.command(
    context_settings={"allow_interspersed_args": False},
    epilog="""\b
Examples:
  ps-ctl suggest batch train.py --epochs 3
  ps-ctl suggest batch --start 8 --max 512 train.py
  PS_DEVICE=cuda:1 ps-ctl suggest batch -m my_package.train

\b
The options of suggest precede SCRIPT; all following arguments belong to the script.""",
)
@click.option(
    "--start",
    type=click.IntRange(1),
    metavar="SIZE",
    help="Smallest batch size [default: a quarter of the script's own].",
)
@click.option(
    "--max",
    "largest",
    type=click.IntRange(1),
    metavar="SIZE",
    help="Largest batch size [default: the number of samples].",
)
@click.option(
    "--steps",
    type=click.IntRange(1, 10_000),
    default=20,
    show_default=True,
    metavar="COUNT",
    help=f"Timed steps for each size, after {WARM_UP_COUNT} others.",
)
@click.option("-m", "module", is_flag=True, help="Run a module as the script, like python -m.")
@click.argument("script", metavar="SCRIPT")
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
@click.option(
    "--output", type=click.Choice(["table", "json"]), help="Output format [default: table]."
)
@pass_settings
def batch(
    settings: CommandContext,
    output: str | None,
    start: int | None,
    largest: int | None,
    steps: int,
    module: bool,
    script: str,
    args: tuple[str, ...],
) -> None:
    """Find a batch size for a script, and the learning rate there.

    The script runs without servers, in a process for each size, first with its own size. It ends
    after a few steps and saves nothing with job.save.
    """
    with _folder() as folder:
        found = search(Script(script, module, args), steps, start, largest, folder)
    show(output or settings.output, found.document(), found.tables)


@contextmanager
def _folder() -> Iterator[Path]:
    """Yield a temporary folder, which is removed also after SIGTERM."""

    def terminate(*_: object) -> Never:
        raise SystemExit(ExitCode.TERMINATED)

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        with tempfile.TemporaryDirectory(prefix="ps-suggest-") as folder:
            yield Path(folder)
    finally:
        signal.signal(signal.SIGTERM, before)


class Trial(NamedTuple):
    """What a process has done that ran the script.

    Attributes:
        code: Its exit code; negative: the number of the signal that ended it.
        result: Its measurements.
        output: The end of its output, and the traceback.
    """

    code: int
    result: TrialResult
    output: list[str]

    def as_try(self, batch_size: int, steps: int) -> BatchTry:
        """Return what it says of a batch size. steps: Number of timed steps that were asked for."""
        result = self.result
        if len(result.seconds) == steps:
            seconds = sum(result.seconds)
            return BatchTry(
                batch_size,
                sum(result.samples) / seconds,
                seconds / steps,
                result.memory,
                result.gpu_memory,
            )
        if self.code == 0:
            problem = f"ended after {result.steps} of {WARM_UP_COUNT + steps} steps"
            return BatchTry(batch_size, problem=problem)
        has_words = any(word in line for line in self.output for word in WORDS_OF_MEMORY)
        if has_words or self.code == -signal.SIGKILL:  # the kernel's, where memory ends
            return BatchTry(batch_size, problem=OUT_OF_MEMORY, is_out_of_memory=True)
        ending = f"exit code {self.code}" if self.code > 0 else f"signal {-self.code}"
        return BatchTry(batch_size, problem=f"failed with {ending}")


def run_script(script: Script, order: TrialOrder, folder: Path) -> Trial:
    """Run the script in a process of its own, which ends before this function does."""
    environment = {key: value for key, value in os.environ.items() if key not in NOT_FOR_TRIALS}
    environment |= {
        "PS_LOCAL": "1",
        "PYTHONUNBUFFERED": "1",
        TRIAL_VARIABLE: json.dumps(order._asdict()),
        TRACEBACK_FILE: str(folder / "traceback"),
    }
    module = ["-m"] if script.module else []
    codes: list[int] = []
    has_ended = threading.Event()

    def on_exit(_: Process, code: int) -> None:
        codes.append(code)
        has_ended.set()

    process = ManagedProcess(
        "script",
        [*WORKER, *module, "--", script.target, *script.args],
        environment,
        Path(os.devnull),
        traceback_file=folder / "traceback",
        on_line=lambda *_: None,
        on_exit=on_exit,
    )
    try:
        signals.wait(has_ended)
    finally:
        process.kill()
        process.join()
    result, file = TrialResult(), Path(order.file)
    if file.exists():
        result = TrialResult(**json.loads(file.read_text()))
        file.unlink()
    return Trial(codes[0], result, [*process.tail, *process.traceback])


class Found(NamedTuple):
    """The result of a search.

    Attributes:
        script: The script's name.
        own: Its own batch size.
        result: What its first trial has found.
        tries: The results, by batch size.
        knee: One of them.
        ended: Why the search ended.
    """

    script: str
    own: int
    result: TrialResult
    tries: list[BatchTry]
    knee: BatchTry
    ended: str

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "script": self.script,
            "device": self.result.device,
            "batch_size": self.own,
            "knee": self.knee.batch_size,
            "ended": self.ended,
            "tries": [each._asdict() for each in self.tries],
            "optimizers": [
                {
                    "name": name,
                    "optimizer": kind,
                    "rule": RULES.get(kind),
                    "factor": (factor := scale_factor(kind, self.knee.batch_size / self.own)),
                    "learning_rates": rates,
                    "learning_rates_at_knee": [rate * factor for rate in rates if factor],
                }
                for name, kind, rates in self.result.optimizers
            ],
        }

    def tables(self) -> list[Table]:
        """Return the tables of the document."""
        knee = self.knee.batch_size
        rows = [
            (
                each.batch_size,
                _rate(each),
                _step_time(each),
                size(each.memory),
                size(each.gpu_memory),
                ", ".join(
                    [
                        *(["yours"] if each.batch_size == self.own else []),
                        *(["knee"] if each.batch_size == knee else []),
                        *([each.problem] if each.problem else []),
                    ]
                ),
            )
            for each in self.tries
        ]
        rates = [
            (
                each["name"],
                each["optimizer"],
                each["rule"] or "none is known",
                number(each["factor"]),
                ", ".join(map(number, each["learning_rates"])),
                ", ".join(map(number, each["learning_rates_at_knee"])),
            )
            for each in self.document()["optimizers"]
        ]
        return [
            Table(
                f"{self.script} on {self.result.device}",
                ("batch size", "samples/s", "step", "memory", "GPU memory", ""),
                rows,
            ),
            Table("", (), [("end of the search", self.ended)]),
            Table(
                f"Learning rate at the knee, {knee}",
                ("name", "optimizer", "rule", "factor", f"rate at {self.own}", f"rate at {knee}"),
                rates,
            ),
        ]


def _rate(each: BatchTry) -> str:
    rate = each.samples_per_second
    return "" if rate is None else f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


def _step_time(each: BatchTry) -> str:
    seconds = each.step_seconds
    if seconds is None:
        return ""
    return duration(seconds) if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def search(
    script: Script, steps: int, start: int | None, largest: int | None, folder: Path
) -> Found:
    """Run the script with its own batch size, and then with others.

    Raises:
        InvalidRequestError: It cannot be measured; the end of its output is on stderr if it failed.
    """
    if not script.module:
        script.spec()  # refuses a script that does not exist
    order = TrialOrder(str(folder / "result.json"), steps)
    click.echo(f"{script.target} as it is: ", nl=False, err=True)
    first = run_script(script, order, folder)
    sizes = "".join(f"batch size {size}, " for size in first.result.batch_sizes if size)
    click.echo(sizes + _summary(first.as_try(0, steps)), err=True)
    own = _own_size(script, first, steps)
    tries = {own: first.as_try(own, steps)}
    length, smallest = first.result.length, start or first_size(own)
    reason = f"`--max {largest}`"
    if length is not None and (largest is None or length < largest):
        largest, reason = length, f"the data set has {length} samples"
    limits = Limits(largest, reason, usable_memory())
    while isinstance(tried := next_size(tries, smallest, limits), int):
        click.echo(f"batch size {tried}: ", nl=False, err=True)
        trial = run_script(script, order._replace(replaces=own, batch_size=tried), folder)
        tries[tried] = trial.as_try(tried, steps)
        click.echo(_summary(tries[tried]), err=True)
        if tries[tried].problem and not tries[tried].is_out_of_memory:
            _show_end(trial)
    results = sorted(tries.values())
    knee = find_knee(results)
    if knee is None:
        raise InvalidRequestError(
            f"cannot measure {script.target}: no batch size works: {tried}. Try: a smaller "
            "`--start SIZE`"
        )
    return Found(script.target, own, first.result, results, knee, tried)


def _own_size(script: Script, first: Trial, steps: int) -> int:
    """Return the batch size of the script. Raises InvalidRequestError if it cannot be measured."""
    target, sizes, tried = script.target, first.result.batch_sizes, first.as_try(0, steps)
    if first.code == 0 and not sizes:
        raise InvalidRequestError(
            f"cannot measure {target}: it makes no training pass over job.batches. Try: "
            "job.batches(dataset, batch_size=...)"
        )
    if tried.problem and not (sizes and tried.is_out_of_memory):
        _show_end(first)
        raise InvalidRequestError(
            f"cannot measure {target}: it {tried.problem}. Try: "
            + (
                f"more data or epochs, or fewer `--steps {steps}`"
                if first.code == 0
                else f"make `PS_LOCAL=1 ps-worker {'-m ' if script.module else ''}{target}` work"
            )
        )
    if 0 in sizes:
        raise InvalidRequestError(
            f"cannot try other batch sizes: a batch_sampler of {target} decides them. Try: "
            "batch_size= and sampler="
        )
    if len(sizes) > 1:
        raise InvalidRequestError(
            f"cannot try other batch sizes: the training passes of {target} have several: "
            f"{', '.join(map(str, sizes))}. Try: one batch size for all of them"
        )
    return sizes[0]


def _summary(tried: BatchTry) -> str:
    if tried.problem:
        return tried.problem
    memory = size(tried.memory if tried.gpu_memory is None else tried.gpu_memory)
    return f"{_rate(tried)} samples/s, {_step_time(tried)} a step, {memory}"


def _show_end(trial: Trial) -> None:
    for line in trial.output:
        click.echo(f"  {line}", err=True)
