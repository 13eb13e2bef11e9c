"""What shards ask of each other (proto/psproto/v1/shard.proto)."""

from collections.abc import Iterator

import grpc

from pscommon.core.tape import Range
from pscommon.optimizers import scalars_to_json
from pscommon.wire.channel import FRAME_BYTES
from pscommon.wire.status import answering
from psproto.v1 import shard_pb2 as pb
from psproto.v1.shard_pb2_grpc import ShardServiceServicer
from psserver.identity import Identity
from psserver.moving import Moving

FREEZE_SECONDS = 2.0
"""How long another shard may have to wait until this one has come to the entry with which a move begins."""


class ShardPeer(ShardServiceServicer):
    """Lets others read what this shard held before a move."""

    def __init__(self, moves: Moving, identity: Identity) -> None:
        self._moves, self._identity = moves, identity

    def ReadShard(self, request: pb.ReadShardRequest, context: grpc.ServicerContext) -> Iterator[pb.ReadShardResponse]:
        with answering(context):
            self._identity.check_job(request.job)
            frozen = self._moves.frozen(request.epoch, request.index, FREEZE_SECONDS)
            if not request.kind:
                held = frozen.about()
                scalars = scalars_to_json(held.scalars)
                kinds, groups = sorted(held.kinds), held.groups_json
                holding = pb.Holding(kinds=kinds, steps=held.steps, groups_json=groups, scalars_json=scalars)
                yield pb.ReadShardResponse(holding=holding)
                return
            for start, data in frozen.read(request.kind, Range(request.start, request.stop)):
                for first in range(0, data.nbytes, FRAME_BYTES):
                    yield pb.ReadShardResponse(start=start + first, data=bytes(data[first : first + FRAME_BYTES]))
