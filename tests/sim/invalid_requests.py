"""Random requests that no correct worker sends, of each type that reaches the coordinator."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from pscommon.core.data_loop import LoopSpec
from pscommon.core.data_stream import StreamSpec
from pscommon.core.log_entries import BatchKey, PushKey, ShardReport, Staged
from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from psserver.core.commands.command import Command
from psserver.core.commands.data_commands import (
    LeaseBatches,
    ReportMetrics,
    ReportValues,
    ReturnBatches,
)
from psserver.core.commands.job_commands import PolicySettings, SetPolicy
from psserver.core.commands.recorder import Recorder
from psserver.core.commands.shard_commands import StartReshard
from psserver.core.commands.worker_commands import DrainWorker, Join, Leave, Register
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.workers.members import Member
from psserver.core.workers.reported_values import ReportedValue
from tests.support.shard_reports import report_to

NUMBERS = (0, 1, 2, 3, 7, 1023, 2**31, 2**32 - 1, 2**53 + 1, 2**63, 2**64 - 1, 10**30)
TEXTS = ("", "cpu", "ä\x00\n", "QUARANTINED", "x" * 300, "y" * 100_000)
MODEL = ModelSpec(
    (TensorSpec("invalid", (2**31, 2**31), "float64", "frozen"),), OptimizerSettings("none", ({},))
)


FAULT = "fault"
"""Name of a reported value for which FaultyCoordinator raises ZeroDivisionError."""

JOB_WIDE_REQUESTS = (SetPolicy, StartReshard, Register)
"""Requests that change the job for all workers."""


class FaultyCoordinator(CoordinatorMachine):
    """Raises an unexpected error after a part of a command, as a bug would."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        take_latest = self.reported.take_latest

        def take_or_fail(member: Member, name: str, value: float, *rest: Any) -> None:
            take_latest(member, name, value, *rest)
            if name == FAULT:
                self.job.counts["rejected"] += 1
                raise ZeroDivisionError("planted")

        self.reported.take_latest = take_or_fail  # type: ignore[method-assign]


def request(rng: random.Random, workers: Sequence[int]) -> Command[Any]:
    """Draw a request for one of these workers."""
    return rng.choice(_COMMANDS)(rng, rng.choice(workers))


def pushes(rng: random.Random, workers: Sequence[int]) -> tuple[Staged, ...]:
    """Draw the staged pushes of one report."""
    return tuple(_push(rng, rng.choice(workers)) for _ in range(rng.randint(1, 3)))


def send(recorder: Recorder, rng: random.Random, workers: Sequence[int], now: float) -> Any:
    """Send a random request, or report the same random pushes for each shard."""
    coordinator = recorder.coordinator
    if rng.random() < 0.7:
        return recorder.do(request(rng, workers), now)
    staged = pushes(rng, workers)
    for shard in range(coordinator.job.shards):
        report_to(
            recorder, ShardReport(shard, coordinator.job.log_id, coordinator.log.index, staged), now
        )
    return None


def unfit_push(coordinator: CoordinatorMachine, rng: random.Random, worker: int) -> Staged:
    """Draw a push whose base is above the job's version. Its other fields may be invalid, too."""
    push = _push(rng, worker)
    return Staged(
        PushKey(worker, min(max(1, push.key.seq), 2**64 - 1)),  # no message has a larger number
        push.samples,
        coordinator.job.version + 1 + push.base,
        push.batches,
    )


def _number(rng: random.Random) -> int:
    return rng.choice((*NUMBERS, -1, rng.randrange(20)))


def _push(rng: random.Random, worker: int) -> Staged:
    key = PushKey(worker, rng.choice((rng.randint(1, 30), *NUMBERS)))
    norm = rng.choice([0.0, 1.0, 1e300, math.inf])
    samples, base = rng.choice(NUMBERS), rng.choice((*NUMBERS, rng.randrange(5)))
    return Staged(key, samples, base, _batches(rng), "", norm)


def _batches(rng: random.Random) -> tuple[BatchKey, ...]:
    loops = (0, 1, 2, 3, 2**32 - 1)
    keys = [
        BatchKey(rng.choice(loops), _number(rng), _number(rng), rng.random() < 0.5)
        for _ in range(rng.randrange(4))
    ]
    return tuple(keys)


def _loop(rng: random.Random) -> LoopSpec | StreamSpec:
    loop = rng.choice([0, 1, 2, 3, 2**32 - 1])
    epochs = rng.choice([0, 1, 10**9, 2**32 - 1])
    if rng.random() < 0.5:
        return StreamSpec(loop, rng.choice([1, 2, 2**32 - 1]), rng.choice([1, 3, 2**63]), epochs)
    return LoopSpec(
        loop,
        rng.choice([0, 1, 5, 2**64 - 1]),
        rng.choice([1, 3, 2**64 - 1]),
        epochs,
        rng.random() < 0.5,
    )


def _values(rng: random.Random) -> list[ReportedValue]:
    times = (0.0, -1e18, 1e18, math.inf, -math.inf, math.nan)
    return [
        ReportedValue(name, value, _number(rng), rng.choice(times))
        for name, value in _metrics(rng).items()
    ]


def _metrics(rng: random.Random) -> dict[str, float]:
    names = [rng.choice(TEXTS), *(f"name {number}" for number in range(rng.choice([0, 1, 2000])))]
    return dict.fromkeys(names, rng.choice([0.5, math.nan, math.inf, -math.inf]))


_COMMANDS: Sequence[Callable[[random.Random, int], Command[Any]]] = (
    lambda rng, worker: Join(
        rng.choice([None, _number(rng)]),
        rng.choice(TEXTS),
        _number(rng),
        rng.choice(TEXTS),
        _number(rng),
    ),
    lambda rng, worker: Register(worker, MODEL, rng.choice([0, 2**64 - 1])),
    lambda rng, worker: Leave(worker, rng.choice(TEXTS)),
    lambda rng, worker: DrainWorker(worker),
    lambda rng, worker: LeaseBatches(
        worker, _loop(rng), _number(rng), _number(rng), rng.random() < 0.5, _number(rng)
    ),
    lambda rng, worker: ReturnBatches(worker, list(_batches(rng))),
    lambda rng, worker: ReportMetrics(worker, _metrics(rng)),
    lambda rng, worker: ReportValues(worker, _values(rng)),
    lambda rng, worker: SetPolicy(
        PolicySettings(rng.choice(["sync", "async", "ssp", "all"]), *_row(rng))
    ),
    lambda rng, worker: StartReshard(rng.choice([-1, 0, 10**8, 2**32 - 1]), False),
)


def _row(rng: random.Random) -> tuple[int | None, int | None, int]:
    return (
        rng.choice([None, 0, 3, 2**32 - 1]),
        rng.choice([None, 0, 2**32 - 1]),
        rng.choice([0, 1, 10**9]),
    )
