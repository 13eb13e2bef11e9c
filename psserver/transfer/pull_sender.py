"""Send changed weights as frames, as one message, or into the worker's shared memory."""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from psproto.v1 import parameter_server_pb2 as pb
from psserver.parameters.store import ParameterStore
from psserver.parameters.weight_reads import WeightRead
from psserver.shard.engine import ShardEngine


class PullSender:
    """Answers the pulls of one shard."""

    def __init__(self, engine: ShardEngine) -> None:
        self._engine = engine

    @contextmanager
    def open(
        self, header: pb.PushPullHeader, result: pb.ExchangeResult, is_connected: Callable[[], bool]
    ) -> Iterator[WeightRead]:
        """Yield the weights of one version for a pull, and describe them in `result`.

        Raises InFlightError if the byte budget has no room.
        """
        nbytes = self._engine.live.require_store().step_nbytes
        with self._engine.traffic.budget.borrow(
            header.worker, nbytes, header.wait_ms / 1000, is_connected
        ):
            read = self.read(header, result)
            try:
                yield read
                self._engine.traffic.transfer.count_sent(read.nbytes)
            finally:
                read.close()

    def read(self, header: pb.PushPullHeader, result: pb.ExchangeResult) -> WeightRead:
        """Begin to read the weights for a pull, and describe them in `result`.

        The caller has the memory for a copy in the byte budget, and closes the read.
        """
        with self._engine.live.lock_weights(header.shards) as (version, store):
            return _open_read(store, version, header, result)

    def read_all(self, header: pb.PushPullHeader, result: pb.ExchangeResult) -> bytes:
        """Return all bytes of a small pull at once, and describe them in `result`."""
        with self._engine.live.lock_weights(header.shards) as (version, store):
            read = _open_read(store, version, header, result)
            weights = b"".join(read.views())
            read.close()
        self._engine.traffic.transfer.count_sent(len(weights))
        return weights

    def write_shared(self, header: pb.PushPullHeader, result: pb.ExchangeResult) -> None:
        """Copy the weights to the worker's shared memory, and describe them in `result`."""
        buffers, began = self._engine.traffic.shared_buffers.find(header), time.monotonic()
        with self._engine.live.lock_weights(header.shards) as (version, store):
            unchanged = _find_unchanged(store, version, header, result)
            if unchanged is not None:
                everything = header.pull == pb.PULL_ALL
                result.nbytes = store.copy_to(buffers.weights, everything, unchanged)
        result.pull_seconds = time.monotonic() - began
        self._engine.traffic.transfer.count_sent(result.nbytes)


def _open_read(
    store: ParameterStore, version: int, header: pb.PushPullHeader, result: pb.ExchangeResult
) -> WeightRead:
    unchanged = _find_unchanged(store, version, header, result)
    read = store.read(unchanged is not None, header.pull == pb.PULL_ALL, unchanged or ())
    result.nbytes = read.nbytes
    return read


def _find_unchanged(
    store: ParameterStore, version: int, header: pb.PushPullHeader, result: pb.ExchangeResult
) -> Collection[int] | None:
    """Return the tensors that the worker already has; None if it has all. Also sets `result`."""
    result.version = version
    if not header.HasField("have") or header.have > version or header.pull == pb.PULL_ALL:
        return ()
    if header.have == version:
        return None
    unchanged = store.find_unchanged(version - header.have)
    result.unchanged.extend(sorted(unchanged))
    return unchanged
