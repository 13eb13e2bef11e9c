"""A shard's new part of the model, made of what all shards held before a move."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from pscommon.core.errors import SnapshotError, UnreachableError
from pscommon.core.model_spec import ROLES
from pscommon.core.partition import ByteRange, PartitionPlan
from pscommon.optim.specs import Scalars, scalars_from_json
from pscommon.wire.channel import open_channel
from pscommon.wire.status import translated
from psproto.v1 import shard_pb2 as pb
from psproto.v1.shard_pb2_grpc import ShardServiceStub
from psserver.parameters.frozen_shard import FrozenBytes, FrozenDescription

CALL_SECONDS, SLOWEST_BYTES_PER_SECOND = 10.0, 100e3
"""Of a line that several servers share; one whose peer is gone is noticed by pings, long before."""


class PreviousShard(Protocol):
    """One shard of before. Both raise UnreachableError where it is not there, or holds it not
    any more.
    """

    def about(self) -> FrozenDescription: ...
    def read(self, kind: str, span: ByteRange) -> Iterator[FrozenBytes]: ...


class PeerShard:
    """Another server. nbytes: that came from it. current: what it holds now, instead of at a
    move's entry.
    """

    def __init__(
        self, address: str, job: str, epoch: int = 0, index: int = 0, current: bool = False
    ) -> None:
        self.nbytes = 0
        self._address, self._channel = address, open_channel(address, tensors=True)
        self._stub = ShardServiceStub(self._channel)
        self._request = pb.ReadShardRequest(job=job, epoch=epoch, index=index, current=current)

    @property
    def version(self) -> int:
        """Of what it holds now."""
        for response in self._asked("", ByteRange(0, 0)):
            return response.holding.version
        raise UnreachableError(
            f"the server at {self._address} does not say what it holds", "NOT_READY"
        )

    def about(self) -> FrozenDescription:
        for response in self._asked("", ByteRange(0, 0)):
            held = response.holding
            scalars = scalars_from_json(held.scalars_json)
            return FrozenDescription(
                frozenset(held.kinds), dict(held.steps), held.groups_json, scalars
            )
        return FrozenDescription(frozenset(), {}, "", {})

    def read(self, kind: str, span: ByteRange) -> Iterator[FrozenBytes]:
        for response in self._asked(kind, span):
            self.nbytes += len(response.data)
            yield FrozenBytes(response.start, memoryview(response.data))

    def _asked(self, kind: str, span: ByteRange) -> Iterator[pb.ReadShardResponse]:
        request = pb.ReadShardRequest(kind=kind, start=span.start, stop=span.stop)
        request.MergeFrom(self._request)
        with translated(f"the server at {self._address} (ReadShard)"):
            yield from self._stub.ReadShard(
                request, timeout=CALL_SECONDS + span.nbytes / SLOWEST_BYTES_PER_SECOND
            )

    def close(self) -> None:
        self._channel.close()


class ReshardReader:
    """Reads the tape from the shards of before (store.TapeReader). needed: the ranges that will
    be read.

    sources: by shard. Only those that have something of these ranges are asked.
    """

    def __init__(
        self, plan: PartitionPlan, sources: Sequence[PreviousShard], needed: Sequence[ByteRange]
    ) -> None:
        self._plan = plan
        holders = {shard for span in needed for shard in self._holders(span)} or {0}
        self._sources = dict(enumerate(sources))
        self._about = {shard: self._sources[shard].about() for shard in sorted(holders)}

    def kinds(self) -> set[str]:
        return {kind for about in self._about.values() for kind in about.kinds}

    def steps(self) -> dict[int, int]:
        return {
            tensor: count for about in self._about.values() for tensor, count in about.steps.items()
        }

    def scalars(self) -> Scalars:
        merged: dict[str, dict[int, float]] = {}
        for about in self._about.values():
            for name, values in about.scalars.items():
                merged.setdefault(name, {}).update(values)
        return merged

    def groups_json(self) -> str:
        """They are the same on every shard."""
        return next(iter(self._about.values())).groups_json

    def read(self, kind: str, start: int, stop: int, out: memoryview) -> bool:
        """Fills `out` with bytes [start, stop) of the tape; padding comes as zeros. False: they
        are not all there.
        """
        span, target, found = ByteRange(start, stop), out.cast("B"), []
        for shard in self._holders(span):
            for piece in self._sources[shard].read(kind, span):
                found.append(ByteRange(piece.start, piece.start + piece.data.nbytes))
                target[piece.start - start : found[-1].stop - start] = piece.data
        gaps = list(_gaps(span, found))
        for gap in gaps:
            target[gap.start - start : gap.stop - start] = bytes(gap.nbytes)
        missing = [tensor for gap in gaps for tensor in self._plan.slices(gap)]
        if missing and kind == "weight":
            raise SnapshotError(
                f"no shard had all weights of {self._plan.spec.tensors[missing[0].tensor].name}"
            )
        return not missing

    def _holders(self, span: ByteRange) -> list[int]:
        plan = self._plan
        return [
            s for s in range(plan.shards) if any(_meet(plan.range(s, role), span) for role in ROLES)
        ]


def needed_by(plan: PartitionPlan, shard: int) -> list[ByteRange]:
    """All that a shard holds."""
    return [plan.range(shard, role) for role in ROLES]


def _meet(one: ByteRange, other: ByteRange) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


def _gaps(span: ByteRange, found: Sequence[ByteRange]) -> Iterator[ByteRange]:
    position = span.start
    for start, stop in sorted(found):
        if position < start:
            yield ByteRange(position, start)
        position = max(position, stop)
    if position < span.stop:
        yield ByteRange(position, span.stop)
