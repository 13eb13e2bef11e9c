"""Requests that no correct worker sends, of every type that reaches the coordinator."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pscommon.core.data_loop import LoopSpec
from pscommon.core.data_stream import StreamSpec
from pscommon.core.log_entries import BatchKey, PushKey, ShardReport, Staged
from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from psserver.core.commands.recorder import Recorder
from psserver.core.job.coordinator import CoordinatorMachine

NUMBERS = (0, 1, 2, 3, 7, 1023, 2**31, 2**32 - 1, 2**53 + 1, 2**63, 2**64 - 1, 10**30)
TEXTS = ("", "cpu", "ä\x00\n", "QUARANTINED", "x" * 300, "y" * 100_000)
MODEL = ModelSpec(
    (TensorSpec("absurd", (2**31, 2**31), "float64", "frozen"),), OptimizerSettings("none", ({},))
)


FAULT = "fault"
"""A reported value of this name raises ZeroDivisionError in a coordinator with a planted error
(Faulty).
"""

OF_OPERATORS = frozenset({"set_policy", "reshard", "register"})
"""Requests that change a job for all its workers where they are granted."""


class Faulty(CoordinatorMachine):
    """Raises an unexpected error in the midst of a command, as a bug would."""

    def report_metrics(self, worker: int, metrics: dict[str, float], now: float) -> None:
        super().report_metrics(worker, metrics, now)
        if FAULT in metrics:
            self.counts["rejected"] += 1
            raise ZeroDivisionError("planted")


class Request(NamedTuple):
    """One command with its arguments."""

    name: str
    args: dict[str, Any]


def request(rng: random.Random, workers: Sequence[int]) -> Request:
    """Draw one; workers: numbers that it may be sent for."""
    name = rng.choice(list(_ARGUMENTS))
    return Request(name, _ARGUMENTS[name](rng, rng.choice(workers)))


def pushes(rng: random.Random, workers: Sequence[int]) -> tuple[Staged, ...]:
    """Staged pushes of one report."""
    return tuple(_push(rng, rng.choice(workers)) for _ in range(rng.randint(1, 3)))


def send(recorder: Recorder, rng: random.Random, workers: Sequence[int], now: float) -> Any:
    """Send one request, or report pushes as each shard would."""
    coordinator = recorder.coordinator
    if rng.random() < 0.7:
        name, args = request(rng, workers)
        return recorder.do(name, now, **args)
    staged = pushes(rng, workers)
    for shard in range(coordinator.shards):
        recorder.report(ShardReport(shard, coordinator.epoch, coordinator.log.index, staged), now)
    return None


def unfit_push(coordinator: CoordinatorMachine, rng: random.Random, worker: int) -> Staged:
    """A push whose base is above the job's version, and everything else of it may be absurd,
    too.
    """
    push = _push(rng, worker)
    return Staged(
        PushKey(worker, max(1, push.key.seq)),
        push.samples,
        coordinator.version + 1 + push.base,
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


def _values(rng: random.Random) -> list[tuple[str, float, int, float]]:
    times = (0.0, -1e18, 1e18, math.inf, -math.inf, math.nan)
    return [(name, value, _number(rng), rng.choice(times)) for name, value in _metrics(rng).items()]


def _metrics(rng: random.Random) -> dict[str, float]:
    names = [rng.choice(TEXTS), *(f"name {number}" for number in range(rng.choice([0, 1, 2000])))]
    return dict.fromkeys(names, rng.choice([0.5, math.nan, math.inf, -math.inf]))


_ARGUMENTS: dict[str, Callable[[random.Random, int], dict[str, Any]]] = {
    "join": lambda rng, worker: {
        "rank": rng.choice([None, _number(rng)]),
        "host": rng.choice(TEXTS),
        "pid": _number(rng),
        "device": rng.choice(TEXTS),
        "attempt": _number(rng),
    },
    "register": lambda rng, worker: {"worker": worker, "spec": MODEL},
    "leave": lambda rng, worker: {"worker": worker, "reason": rng.choice(TEXTS)},
    "drain": lambda rng, worker: {"worker": worker},
    "next_batches": lambda rng, worker: {
        "worker": worker,
        "spec": _loop(rng),
        "received": _number(rng),
        "count": _number(rng),
        "idle": rng.random() < 0.5,
        "first_open": _number(rng),
    },
    "return_batches": lambda rng, worker: {"worker": worker, "batches": list(_batches(rng))},
    "report_metrics": lambda rng, worker: {"worker": worker, "metrics": _metrics(rng)},
    "report_values": lambda rng, worker: {"worker": worker, "values": _values(rng)},
    "set_policy": lambda rng, worker: {
        "row": [rng.choice(["sync", "async", "ssp", "all"]), *_row(rng)]
    },
    "reshard": lambda rng, worker: {
        "shards": rng.choice([-1, 0, 10**8, 2**32 - 1]),
        "keeps": False,
    },
}


def _row(rng: random.Random) -> list[int | None]:
    return [
        rng.choice([None, 0, 3, 2**32 - 1]),
        rng.choice([None, 0, 2**32 - 1]),
        rng.choice([0, 1, 10**9]),
    ]
