"""Weights for those who ask: as frames, as one message, or into the worker's memory; only what
has changed.
"""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from psproto.v1 import parameter_server_pb2 as pb
from psserver.parameters.store import ParameterStore
from psserver.parameters.weight_reads import WeightRead
from psserver.shard.engine import ShardEngine


class PullSender:
    """The pulls of one shard."""

    def __init__(self, engine: ShardEngine) -> None:
        self._engine = engine

    @contextmanager
    def reading(
        self, header: pb.PushPullHeader, result: pb.ExchangeResult, alive: Callable[[], bool]
    ) -> Iterator[WeightRead]:
        """The weights that a pull gets, one version of them; says in `result` which.
        InFlightError: no room to send.
        """
        nbytes = self._engine.wait_for_store(0.0).step_nbytes
        with self._engine.budget.lent(header.worker, nbytes, header.wait_ms / 1000, alive):
            with self._engine.standing(header.shards) as (version, store):
                reading = _open(store, version, header, result)
            try:
                yield reading
                self._engine.traffic.sent(reading.nbytes)
            finally:
                reading.close()

    def whole(self, header: pb.PushPullHeader, result: pb.ExchangeResult) -> bytes:
        """As reading, all bytes at once: for small ones."""
        with self._engine.standing(header.shards) as (version, store):
            reading = _open(store, version, header, result)
            whole = b"".join(reading.views())
            reading.close()
        self._engine.traffic.sent(len(whole))
        return whole

    def into_memory(self, header: pb.PushPullHeader, result: pb.ExchangeResult) -> None:
        """As reading, into the worker's shared memory."""
        tapes, began = self._engine.memories.tapes(header), time.monotonic()
        with self._engine.standing(header.shards) as (version, store):
            unchanged = _unchanged(store, version, header, result)
            if unchanged is not None:
                everything = header.pull == pb.PULL_ALL
                result.nbytes = store.copy_to(tapes.weights, everything, unchanged)
        result.pull_seconds = time.monotonic() - began
        self._engine.traffic.sent(result.nbytes)


def _open(
    store: ParameterStore, version: int, header: pb.PushPullHeader, result: pb.ExchangeResult
) -> WeightRead:
    unchanged = _unchanged(store, version, header, result)
    reading = store.read(unchanged is not None, header.pull == pb.PULL_ALL, unchanged or ())
    result.nbytes = reading.nbytes
    return reading


def _unchanged(
    store: ParameterStore, version: int, header: pb.PushPullHeader, result: pb.ExchangeResult
) -> Collection[int] | None:
    """Tensors that the caller has; None: it has everything. Says so in `result`."""
    result.version = version
    if not header.HasField("have") or header.have > version or header.pull == pb.PULL_ALL:
        return ()
    if header.have == version:
        return None
    unchanged = store.unchanged(version - header.have)
    result.unchanged.extend(sorted(unchanged))
    return unchanged
