"""Answer the requests of other shards (proto/psproto/v1/shard.proto)."""

from collections.abc import Iterator
from functools import partial

import grpc

from pscommon.core.partition import ByteRange
from pscommon.optim.specs import scalars_to_json
from pscommon.wire.frames import FRAME_BYTES
from pscommon.wire.requests import READ_SHARD
from psproto.v1 import shard_pb2 as pb
from psserver.peers.final_weights import LocalShard
from psserver.peers.resharding import PreviousShard
from psserver.process.handlers import Handlers
from psserver.process.identity import ServerIdentity
from psserver.shard.live_state import LiveShardState

FREEZE_TIMEOUT_SECONDS = 2.0
"""Seconds that a request of another shard waits until this one has applied the Reshard entry."""


def peer_handlers(live: LiveShardState, identity: ServerIdentity) -> Handlers:
    """Return the handler that serves this shard's partition."""
    return {READ_SHARD: partial(_read_shard, live, identity)}


def _read_shard(
    live: LiveShardState,
    identity: ServerIdentity,
    request: pb.ReadShardRequest,
    context: grpc.ServicerContext,
) -> Iterator[pb.ReadShardResponse]:
    """Yield the partition from before a reshard, or the current one."""
    identity.check_job(request.job)
    source, version = _find_source(live, request)
    if not request.kind:
        description = source.describe()
        holding = pb.Holding(
            kinds=sorted(description.kinds),
            steps=description.steps,
            groups_json=description.groups_json,
            scalars_json=scalars_to_json(description.scalars),
            version=version,
        )
        yield pb.ReadShardResponse(holding=holding)
        return
    for start, data in source.read(request.kind, ByteRange(request.start, request.stop)):
        for first in range(0, data.nbytes, FRAME_BYTES):
            yield pb.ReadShardResponse(
                start=start + first, data=bytes(data[first : first + FRAME_BYTES])
            )


def _find_source(live: LiveShardState, request: pb.ReadShardRequest) -> tuple[PreviousShard, int]:
    """Return what is requested, and the version of the current weights."""
    if request.current:
        local = LocalShard(live)
        return local, local.version
    return live.wait_for_frozen(request.epoch, request.index, FREEZE_TIMEOUT_SECONDS), 0
