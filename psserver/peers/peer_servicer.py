"""Answer the requests of other shards (proto/psproto/v1/shard.proto)."""

from collections.abc import Iterator

import grpc

from pscommon.core.partition import ByteRange
from pscommon.optim.specs import scalars_to_json
from pscommon.wire.frames import FRAME_BYTES
from pscommon.wire.status import answering
from psproto.v1 import shard_pb2 as pb
from psproto.v1.shard_pb2_grpc import ShardServiceServicer
from psserver.peers.final_weights import LocalShard
from psserver.peers.reshard_reader import PreviousShard
from psserver.process.identity import ServerIdentity
from psserver.shard.live_state import LiveShardState

FREEZE_TIMEOUT_SECONDS = 2.0
"""Seconds that a request of another shard waits until this one has applied the Reshard entry."""


class PeerServicer(ShardServiceServicer):
    """Serves this shard's partition from before a reshard, or its current one."""

    def __init__(self, live: LiveShardState, identity: ServerIdentity) -> None:
        self._live, self._identity = live, identity

    def ReadShard(
        self, request: pb.ReadShardRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.ReadShardResponse]:
        with answering(context):
            self._identity.check_job(request.job)
            source, version = self._find_source(request)
            if not request.kind:
                description = source.describe()
                scalars = scalars_to_json(description.scalars)
                kinds, groups = sorted(description.kinds), description.groups_json
                holding = pb.Holding(
                    kinds=kinds, steps=description.steps, groups_json=groups, scalars_json=scalars
                )
                holding.version = version
                yield pb.ReadShardResponse(holding=holding)
                return
            for start, data in source.read(request.kind, ByteRange(request.start, request.stop)):
                for first in range(0, data.nbytes, FRAME_BYTES):
                    yield pb.ReadShardResponse(
                        start=start + first, data=bytes(data[first : first + FRAME_BYTES])
                    )

    def _find_source(self, request: pb.ReadShardRequest) -> tuple[PreviousShard, int]:
        """Return what is requested, and the version of the current weights."""
        if request.current:
            local = LocalShard(self._live)
            return local, local.version
        frozen = self._live.wait_for_frozen(request.epoch, request.index, FREEZE_TIMEOUT_SECONDS)
        return frozen, 0
