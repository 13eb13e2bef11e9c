"""A psworker.Client with a journal of its calls, over a lane that may lose and repeat calls."""

import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pscommon.core.data_loop import LoopSpec
from pscommon.core.log_entries import BatchKey
from pscommon.core.partition import PartitionPlan
from pscommon.wire.frames import Frame
from psproto.v1 import parameter_server_pb2 as ps
from psworker import Client
from psworker.client.batch_client import BatchClient
from psworker.core.results import Lease, PushResult
from psworker.exchange.model_exchange import ModelExchange
from psworker.transport.exchange_calls import AnswerReceiver, Cancellation, ExchangeAnswer
from tests.chaos.journal import Journal
from tests.support.rpc_faults import FaultyLane

COUNTER = "counter"


class SequenceLane(FaultyLane):
    """A lane that stores the sequence number of the newest push."""

    seq = 0

    def exchange(
        self,
        shard: int,
        header: ps.PushPullHeader,
        send: Sequence[memoryview],
        receiver: AnswerReceiver,
        timeout: float,
        cancellation: Cancellation,
        frames: Iterator[Frame[ps.PushPullHeader]] | None = None,
    ) -> ExchangeAnswer:
        self.seq = header.seq or self.seq
        return super().exchange(shard, header, send, receiver, timeout, cancellation, frames)


class JournaledClient(Client):
    """A client for jobs without overlap, whose steps call `exchange`."""

    def __init__(self, journal: Journal, lane: SequenceLane, **options: Any) -> None:
        super().__init__(lane=lane, **options)
        self.model = JournaledModel(self, self.model, journal, lane)
        self.data = JournaledData(self, self.data, journal)


class JournaledModel:
    """The model of a client; other methods than these are those of `model`."""

    def __init__(
        self, client: Client, model: ModelExchange, journal: Journal, lane: SequenceLane
    ) -> None:
        self._client, self._model = client, model
        self._journal, self._sequence_lane = journal, lane

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

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
        optimizer: str = "",
        reduce_round: int = 0,
        states: Mapping[str, memoryview] | None = None,
        state_json: str = "",
    ) -> PushResult:
        """Call ModelExchange.exchange and write the operation."""
        known = {
            "worker": self._client.worker,
            "before": self.version if base is None else base,
            "batches": tuple((key.loop, key.number) for key in batches),
            "crc": zlib.crc32(gradients) if gradients is not None else 0,
        }
        with self._journal.operation("pull" if gradients is None else "push", **known) as operation:
            self._sequence_lane.seq = 0
            try:
                result = self._model.exchange(
                    gradients=gradients,
                    weights=weights,
                    absent=absent,
                    samples=samples,
                    batches=batches,
                    groups_json=groups_json,
                    base=base,
                    optimizer=optimizer,
                    reduce_round=reduce_round,
                    states=states,
                    state_json=state_json,
                )
            finally:
                operation.seq = self._sequence_lane.seq
            operation.status, operation.reason = result.status, result.reason
            operation.staleness, operation.after = result.staleness, result.version
            if weights is not None:
                operation.counters = counters_in(self._client.plan, weights)
            return result

    def start(self, buffer: memoryview) -> None:
        """Call ModelExchange.start, which reads the job's weights, and write the operation."""
        with self._journal.operation("pull", worker=self._client.worker) as operation:
            self._model.start(buffer)
            operation.status, operation.after = "none", self.version
            operation.counters = counters_in(self._client.plan, buffer)


class JournaledData:
    """The data of a client; other methods than these are those of `data`."""

    def __init__(self, client: Client, data: BatchClient, journal: Journal) -> None:
        self._client, self._data, self._journal = client, data, journal

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def next_batches(
        self, loop: LoopSpec, count: int = 1, idle: bool = False, first_open: int | None = None
    ) -> Lease:
        """Call BatchClient.next_batches and write the operation."""
        with self._journal.operation(
            "lease", worker=self._client.worker, total=loop.total
        ) as operation:
            lease = self._data.next_batches(loop, count, idle, first_open)
            operation.batches = tuple((loop.loop, number) for number in lease.numbers) or (
                (loop.loop, -1),
            )
            operation.ended, operation.status = lease.end, "none"
            return lease


def counters_in(plan: PartitionPlan, buffer: memoryview) -> tuple[float, ...]:
    """Return the smallest and largest element of each float32 tensor named counter*."""
    found: list[float] = []
    for index, tensor in enumerate(plan.spec.tensors):
        if tensor.name.startswith(COUNTER):
            start, stop = plan.extent(index)
            values = np.frombuffer(buffer[start:stop], np.float32)
            found += [float(values.min()), float(values.max())]
    return tuple(found)
