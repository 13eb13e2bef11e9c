"""Read the changed weights for a pull, or copy them into the worker's shared memory."""

import time
from collections.abc import Collection

from psproto.v1 import parameter_server_pb2 as pb
from psserver.parameters.store import ParameterStore
from psserver.parameters.weight_reads import WeightRead
from psserver.shard.engine import ShardEngine


def begin(engine: ShardEngine, header: pb.PushPullHeader, result: pb.ExchangeResult) -> WeightRead:
    """Begin to read the weights for a pull, and describe them in `result`.

    The caller has the memory for a copy in the byte budget, and closes the read.
    """
    with engine.live.lock_weights(header.shards) as (version, store):
        return _begin(store, version, header, result)


def read_all(engine: ShardEngine, header: pb.PushPullHeader, result: pb.ExchangeResult) -> bytes:
    """Return all bytes of a small pull at once, and describe them in `result`."""
    with engine.live.lock_weights(header.shards) as (version, store):
        read = _begin(store, version, header, result)
        weights = b"".join(read.views())
        read.close()
    engine.traffic.transfer.count_sent(len(weights))
    return weights


def write_shared(engine: ShardEngine, header: pb.PushPullHeader, result: pb.ExchangeResult) -> None:
    """Copy the weights to the worker's shared memory, and describe them in `result`."""
    buffers, began = engine.traffic.shared_buffers.find(header), time.monotonic()
    with engine.live.lock_weights(header.shards) as (version, store):
        unchanged = _find_unchanged(store, version, header, result)
        if unchanged is not None:
            everything = header.pull == pb.PULL_ALL
            result.nbytes = store.copy_to(buffers.weights, everything, unchanged)
    result.pull_seconds = time.monotonic() - began
    engine.traffic.transfer.count_sent(result.nbytes)


def _begin(
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
