"""Everything about the traffic between workers and one shard."""

from collections.abc import Mapping, Sequence

from pscommon.settings.values import Lanes
from psserver.process.metrics import ServerMetrics
from psserver.shard.differing_groups import DifferingGroups
from psserver.shard.memory_budget import MemoryBudget
from psserver.shard.observers import ShardObserver
from psserver.shard.push_statistics import PushStatistics
from psserver.shard.shared_buffers import AttachedBuffers
from psserver.shard.transfer_stats import TransferStats

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
    transfer: bytes received and sent.
    pushes: statistics of pushes and updates.
    observers: learn what happens to the shard, in this order.
    """

    def __init__(self, metrics: ServerMetrics, in_flight: int, lanes: Lanes) -> None:
        self.features = FEATURES[lanes]
        self.budget = MemoryBudget(in_flight)
        self.shared_buffers = AttachedBuffers(lanes)
        self.transfer = TransferStats(metrics)
        self.pushes = PushStatistics(metrics)
        self.observers: list[ShardObserver] = [
            self.pushes,
            self.transfer,
            self.shared_buffers,
            DifferingGroups(),
        ]
