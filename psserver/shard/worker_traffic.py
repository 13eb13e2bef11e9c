"""The traffic between workers and one shard: the server reads pushes from the shared memory of
workers on this host, writes pulls to it, and counts what moves.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import torch

from pscommon.core.errors import InvalidRequestError, UnreachableError
from pscommon.parameters.partition import WorkerBuffer
from pscommon.settings.values import Lanes
from pscommon.system.shared_memory import NotSharedError, attach
from pscommon.telemetry.logs import get_logger
from psproto.v1 import parameter_server_pb2 as pb
from psserver.durability.shard_state import ShardState
from psserver.process.metrics import ServerMetrics
from psserver.shard.goodput import Goodput
from psserver.shard.memory_budget import MemoryBudget
from psserver.shard.observers import DifferingGroups, ShardObserver, TrafficStatistics

log = get_logger(__name__)


class WorkerBuffers(NamedTuple):
    """A worker's two flat buffers.

    number: number of the worker's offer.
    """

    number: int
    gradients: WorkerBuffer
    weights: WorkerBuffer

    @classmethod
    def attached(cls, number: int, descriptor: int, nbytes: int) -> Self:
        """Map the buffers that a worker has offered, of `nbytes` bytes each.

        Raises:
            InvalidRequestError: The descriptor is not that of such buffers.
        """
        try:
            mapping = attach(descriptor, 2 * nbytes)
        except NotSharedError as error:
            raise InvalidRequestError(f"the offered memory is refused: {error}") from error
        memory = (
            torch.frombuffer(mapping, dtype=torch.uint8)
            if nbytes
            else torch.empty(0, dtype=torch.uint8)
        )
        return cls(number, WorkerBuffer(memory[:nbytes]), WorkerBuffer(memory[nbytes:]))


class AttachedBuffers(ShardObserver):
    """The newest shared memory that each worker offered.

    The memory of a staged push stays mapped as long as the push needs it.
    """

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._buffers: dict[int, WorkerBuffers] = {}

    def add(self, worker: int, buffers: WorkerBuffers) -> None:
        """Use these buffers of a worker from now on."""
        self._buffers[worker] = buffers
        log.info("shared_memory_attached", worker=worker, nbytes=2 * len(buffers.weights.flat))

    def check_network_allowed(self) -> None:
        """Raise InvalidRequestError if pushes must not come over the network."""
        if self._lanes == "shm":
            raise InvalidRequestError(
                "this server runs with --lanes shm: it accepts pushes through shared memory only"
            )

    def find(self, header: pb.PushPullHeader) -> WorkerBuffers:
        """Return the buffers that a request names.

        Raises UnreachableError (NOT_ATTACHED) otherwise: the worker then offers them again.
        """
        buffers = self._buffers.get(header.worker)
        if buffers is None or buffers.number != header.memory:
            raise UnreachableError(
                f"memory {header.memory} of worker {header.worker} is not attached", "NOT_ATTACHED"
            )
        return buffers

    def on_install(self, state: ShardState) -> None:
        """Drop the buffers of all workers: they offer them again."""
        self._buffers.clear()

    def on_evict(self, worker: int) -> None:
        """Drop the buffers of a worker that has left."""
        self._buffers.pop(worker, None)


FEATURES: Mapping[Lanes, Sequence[str]] = {
    "auto": ("grpc", "shm", "stream"),
    "stream": ("grpc", "stream"),
    "shm": ("shm",),
    "grpc": ("grpc",),
}
"""Transports over which a server with this setting of --lanes takes tensors."""


class WorkerTraffic:
    """Memory, shared buffers and statistics of one shard's traffic with workers.

    features: transports over which this shard takes tensors.
    budget: bytes in flight.
    shared_buffers: memory that workers on this host offered.
    statistics: counts of pushes, updates and bytes.
    goodput: which part of the work counted.
    observers: learn what happens to the shard, in this order.
    """

    def __init__(self, metrics: ServerMetrics, in_flight: int, lanes: Lanes) -> None:
        self.features = FEATURES[lanes]
        self.budget = MemoryBudget(in_flight)
        self.shared_buffers = AttachedBuffers(lanes)
        self.statistics = TrafficStatistics(metrics)
        self.goodput = Goodput()
        self.observers: list[ShardObserver] = [
            self.statistics,
            self.goodput,
            self.shared_buffers,
            DifferingGroups(),
        ]
