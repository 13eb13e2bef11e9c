"""A psworker.Client that keeps a journal of what it does, over a lane that may lose and repeat
calls.
"""

import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from pscommon.core.data_loop import LoopSpec
from pscommon.core.log_entries import BatchKey
from pscommon.core.partition import PartitionPlan
from psproto.v1 import parameter_server_pb2 as ps
from psworker import Client
from psworker.core.results import Lease, PushResult
from psworker.transport.streams import AnswerReceiver, Cancellation, ExchangeAnswer
from tests.chaos.journal import Journal
from tests.support.rpc_faults import FaultyLane

COUNTER = "counter"


class WatchedLane(FaultyLane):
    """Remembers the number of the push that was sent last."""

    seq = 0

    def exchange(
        self,
        shard: int,
        header: ps.PushPullHeader,
        send: Sequence[memoryview],
        receiver: AnswerReceiver,
        timeout: float,
        cancellation: Cancellation,
        frames: Iterator[bytes] | None = None,
    ) -> ExchangeAnswer:
        self.seq = header.seq or self.seq
        return super().exchange(shard, header, send, receiver, timeout, cancellation, frames)


class JournaledClient(Client):
    """For jobs whose steps go through `exchange`: without overlap."""

    def __init__(self, journal: Journal, lane: WatchedLane, **options: Any) -> None:
        self._journal, self._watched = journal, lane
        super().__init__(lane=lane, **options)

    def exchange(
        self,
        *,
        gradients: memoryview | None,
        weights: memoryview | None,
        absent: Collection[int] = (),
        samples: int = 1,
        batches: Sequence[BatchKey] = (),
        groups_json: str = "",
        base: int | None = None,
    ) -> PushResult:
        """As Client's."""
        known = {
            "worker": self.worker,
            "before": self.version if base is None else base,
            "batches": tuple((key.loop, key.number) for key in batches),
            "crc": zlib.crc32(gradients) if gradients is not None else 0,
        }
        with self._journal.operation("pull" if gradients is None else "push", **known) as operation:
            self._watched.seq = 0
            try:
                result = super().exchange(
                    gradients=gradients,
                    weights=weights,
                    absent=absent,
                    samples=samples,
                    batches=batches,
                    groups_json=groups_json,
                    base=base,
                )
            finally:
                operation.seq = self._watched.seq
            operation.status, operation.reason = result.status, result.reason
            operation.staleness, operation.after = result.staleness, result.version
            if weights is not None:
                operation.counters = counters_in(self.plan, weights)
            return result

    def start(self, tape: memoryview) -> None:
        """As Client's: brings the job's weights."""
        with self._journal.operation("pull", worker=self.worker) as operation:
            super().start(tape)
            operation.status, operation.after = "none", self.version
            operation.counters = counters_in(self.plan, tape)

    def next_batches(
        self, loop: LoopSpec, count: int = 1, idle: bool = False, first_open: int | None = None
    ) -> Lease:
        """As Client's."""
        with self._journal.operation("lease", worker=self.worker, total=loop.total) as operation:
            lease = super().next_batches(loop, count, idle, first_open)
            operation.batches = tuple((loop.loop, number) for number in lease.numbers) or (
                (loop.loop, -1),
            )
            operation.ended, operation.status = lease.end, "none"
            return lease


def counters_in(plan: PartitionPlan, tape: memoryview) -> tuple[float, ...]:
    """Smallest and largest element of each float32 tensor named counter*: (smallest, largest,
    smallest, ...).
    """
    found: list[float] = []
    for index, tensor in enumerate(plan.spec.tensors):
        if tensor.name.startswith(COUNTER):
            start, stop = plan.extent(index)
            values = np.frombuffer(tape[start:stop], np.float32)
            found += [float(values.min()), float(values.max())]
    return tuple(found)
