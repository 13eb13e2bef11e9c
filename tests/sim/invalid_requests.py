"""Random requests that no correct worker sends, of each type that reaches the coordinator.

Their numbers are those that a server decodes: within the ranges of pscommon/wire/ranges.py, often
at the ends. Logs of earlier releases have others.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from google.protobuf.message import Message

from pscommon.core.data_loop import LoopSpec
from pscommon.core.data_stream import StreamSpec
from pscommon.core.limits import MAX_BATCHES_PER_REQUEST, loop_problem
from pscommon.core.log_entries import BatchKey, PushKey, ShardReport, Staged
from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from pscommon.wire.messages import entry_to_proto
from pscommon.wire.ranges import RANGES
from psproto.v1 import coordinator_pb2 as co
from psproto.v1 import parameter_server_pb2 as ps
from psserver.core.commands.command import Command
from psserver.core.commands.data_commands import (
    LeaseBatches,
    ReportMetrics,
    ReportValues,
    ReturnBatches,
)
from psserver.core.commands.job_commands import PolicySettings, SetPolicy, WantWorkers
from psserver.core.commands.recorder import Recorder
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


NEWEST_ENTRIES_COUNT = 10
"""Log entries that are encoded after a request."""

FAULT = "fault"
"""Name of a reported value for which FaultyCoordinator raises ZeroDivisionError."""

JOB_WIDE_REQUESTS = (SetPolicy, Register)
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


def request(rng: random.Random, workers: Sequence[int], is_in_range: bool = True) -> Command[Any]:
    """Draw a request for one of these workers. is_in_range: As a server decodes it."""
    return rng.choice(_COMMANDS)(Numbers(rng, is_in_range), rng.choice(workers))


def pushes(rng: random.Random, workers: Sequence[int]) -> tuple[Staged, ...]:
    """Draw the staged pushes of one report."""
    numbers = Numbers(rng)
    return tuple(numbers.push(rng.choice(workers)) for _ in range(rng.randint(1, 3)))


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


def encode(coordinator: CoordinatorMachine) -> None:
    """Encode what answers and the log carry on of the numbers of requests.

    Raises ValueError if a number does not fit its field.
    """
    ledger = coordinator.ledger
    co.JoinResponse(
        open_loop=ledger.open_loop,
        known_loops=ledger.known_loops,
        open_loops=ledger.open_loops,
        loaders=[
            co.LoaderPasses(loader=loader, begun=begun, open=still_open)
            for loader, (begun, still_open) in ledger.passes.begun().items()
        ],
    )
    for entry in coordinator.job.log.after(max(0, coordinator.log.index - NEWEST_ENTRIES_COUNT)):
        entry_to_proto(entry)
    for row in coordinator.reported.history.rows():
        co.HistoryRow(**row._asdict())


def unfit_push(coordinator: CoordinatorMachine, rng: random.Random, worker: int) -> Staged:
    """Draw a push whose base is above the job's version. Its other fields may be invalid, too."""
    push = Numbers(rng).push(worker)
    return Staged(
        PushKey(worker, max(1, push.key.seq)),
        push.samples,
        coordinator.job.version + 1 + push.base,
        push.batches,
    )


class Numbers:
    """Draws the numbers of requests. is_in_range: They are in their ranges."""

    def __init__(self, rng: random.Random, is_in_range: bool = True) -> None:
        self.rng, self._is_in_range = rng, is_in_range

    def draw(self, message: type[Message], field: str) -> int:
        """Draw a number of a field."""
        numbers, allowed = [*NUMBERS, -1, self.rng.randrange(20)], RANGES[message][field]
        if self._is_in_range:
            numbers = [allowed[0], allowed[-1], *(each for each in numbers if each in allowed)]
        return self.rng.choice(numbers)

    def optional(self, message: type[Message], field: str) -> int | None:
        """Draw a number of a field that may be absent."""
        return self.rng.choice([None, self.draw(message, field)])

    def push(self, worker: int) -> Staged:
        key = PushKey(
            worker, self.rng.choice((self.rng.randint(1, 30), self.draw(co.PushKey, "seq")))
        )
        norm = self.rng.choice([0.0, 1.0, 1e300, math.inf])
        samples = self.draw(co.Staged, "samples")
        base = self.rng.choice((self.rng.randrange(5), self.draw(co.Staged, "base")))
        return Staged(key, samples, base, self.batches(), "", norm)

    def batches(self) -> tuple[BatchKey, ...]:
        return tuple(
            BatchKey(
                self.rng.choice((0, 1, 2, 3, self.draw(ps.Batch, "loop"))),
                self.draw(ps.Batch, "number"),
                self.draw(ps.Batch, "count"),
                self.rng.random() < 0.5,
            )
            for _ in range(self.rng.randrange(4))
        )

    def loop(self) -> LoopSpec | StreamSpec:
        """Draw a loop; one in its ranges has numbers for all its batches."""
        rng = self.rng
        loop, epochs = (
            rng.choice([0, 1, 2, 3, max(0, self.draw(co.LoopSpec, "loop"))]),
            rng.choice([0, 1, 10**9, 2**32 - 1]),
        )
        spec: LoopSpec | StreamSpec
        if rng.random() < 0.5:
            sources, size = rng.choice([1, 2, 2**32 - 1]), rng.choice([1, 3, 2**63 - 1])
            spec = StreamSpec(loop, sources, size, epochs)
        else:
            largest = 2**63 - 1 if self._is_in_range else 2**64 - 1
            spec = LoopSpec(
                loop,
                rng.choice([0, 1, 5, largest]),
                rng.choice([1, 3, largest]),
                epochs,
                rng.random() < 0.5,
            )
        return replace(spec, epochs=1) if self._is_in_range and loop_problem(spec) else spec

    def values(self) -> list[ReportedValue]:
        times = (0.0, -1e18, 1e18, math.inf, -math.inf, math.nan)
        return [
            ReportedValue(
                name, value, self.draw(co.ReportedValue, "version"), self.rng.choice(times)
            )
            for name, value in _metrics(self.rng).items()
        ]


def _metrics(rng: random.Random) -> dict[str, float]:
    names = [rng.choice(TEXTS), *(f"name {number}" for number in range(rng.choice([0, 1, 2000])))]
    return dict.fromkeys(names, rng.choice([0.5, math.nan, math.inf, -math.inf]))


_COMMANDS: Sequence[Callable[[Numbers, int], Command[Any]]] = (
    lambda numbers, worker: Join(
        numbers.optional(co.JoinRequest, "rank"),
        numbers.rng.choice(TEXTS),
        numbers.draw(co.JoinRequest, "pid"),
        numbers.rng.choice(TEXTS),
        numbers.draw(co.JoinRequest, "attempt"),
    ),
    lambda numbers, worker: Register(
        worker, MODEL, max(0, numbers.draw(co.RegisterRequest, "seed"))
    ),
    lambda numbers, worker: Leave(worker, numbers.rng.choice(TEXTS)),
    lambda numbers, worker: DrainWorker(worker),
    lambda numbers, worker: LeaseBatches(
        worker,
        numbers.loop(),
        numbers.draw(co.NextBatchRequest, "received"),
        max(1, min(numbers.draw(co.NextBatchRequest, "count"), MAX_BATCHES_PER_REQUEST)),
        numbers.rng.random() < 0.5,
        numbers.draw(co.NextBatchRequest, "first_open"),
    ),
    lambda numbers, worker: ReturnBatches(worker, list(numbers.batches())),
    lambda numbers, worker: ReportMetrics(worker, _metrics(numbers.rng)),
    lambda numbers, worker: ReportValues(worker, numbers.values()),
    lambda numbers, worker: WantWorkers(
        max(1, numbers.draw(co.ScaleWorkersRequest, "workers")), "ps-ctl scale"
    ),
    lambda numbers, worker: SetPolicy(
        PolicySettings(
            numbers.rng.choice(["sync", "async", "ssp", "all"]),
            numbers.optional(co.SetPolicyRequest, "staleness"),
            numbers.optional(co.SetPolicyRequest, "max_staleness"),
            numbers.rng.choice([0, 1, 10**9]),
        )
    ),
)
