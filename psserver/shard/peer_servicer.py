"""What shards ask of each other (proto/psproto/v1/shard.proto)."""

from collections.abc import Iterator

import grpc

from pscommon.core.partition import ByteRange
from pscommon.optim.specs import scalars_to_json
from pscommon.wire.channel import FRAME_BYTES
from pscommon.wire.status import answering
from psproto.v1 import shard_pb2 as pb
from psproto.v1.shard_pb2_grpc import ShardServiceServicer
from psserver.process.identity import ServerIdentity
from psserver.shard.engine import ShardEngine
from psserver.shard.final_weights import OwnShard
from psserver.shard.reshard_reader import PreviousShard

FREEZE_SECONDS = 2.0
"""How long another shard may have to wait until this one has come to the entry with which a move
begins.
"""


class PeerServicer(ShardServiceServicer):
    """Lets others read what this shard held before a move, or holds now."""

    def __init__(self, engine: ShardEngine, identity: ServerIdentity) -> None:
        self._engine, self._identity = engine, identity

    def ReadShard(
        self, request: pb.ReadShardRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.ReadShardResponse]:
        with answering(context):
            self._identity.check_job(request.job)
            source, version = self._source(request)
            if not request.kind:
                held = source.about()
                scalars = scalars_to_json(held.scalars)
                kinds, groups = sorted(held.kinds), held.groups_json
                holding = pb.Holding(
                    kinds=kinds, steps=held.steps, groups_json=groups, scalars_json=scalars
                )
                holding.version = version
                yield pb.ReadShardResponse(holding=holding)
                return
            for start, data in source.read(request.kind, ByteRange(request.start, request.stop)):
                for first in range(0, data.nbytes, FRAME_BYTES):
                    yield pb.ReadShardResponse(
                        start=start + first, data=bytes(data[first : first + FRAME_BYTES])
                    )

    def _source(self, request: pb.ReadShardRequest) -> tuple[PreviousShard, int]:
        """What is asked for, and the version of what is there now."""
        if request.current:
            own = OwnShard(self._engine)
            return own, own.version
        return self._engine.frozen.wait_for(request.epoch, request.index, FREEZE_SECONDS), 0
