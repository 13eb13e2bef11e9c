"""Build a shard's new partition during a reshard, from the partitions that all shards held before
it.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Protocol

from pscommon.core.errors import SnapshotError, UnreachableError
from pscommon.core.model_spec import ROLES
from pscommon.core.partition import ByteRange, PartitionPlan
from pscommon.optim.specs import Scalars, scalars_from_json
from pscommon.wire.endpoint import Endpoint, open_channel
from pscommon.wire.requests import READ_SHARD, Stub
from pscommon.wire.status import translated
from psproto.v1 import shard_pb2 as pb
from psserver.parameters.frozen_shard import FrozenBytes, FrozenDescription
from psserver.shard.engine import ShardEngine

CALL_TIMEOUT_SECONDS, MIN_BYTES_PER_SECOND = 10.0, 100e3
"""A call's timeout and the assumed bandwidth of a network that several servers share. Keepalive
pings detect a lost peer much sooner.
"""


class PreviousShard(Protocol):
    """One shard's partition before a reshard.

    Both methods raise UnreachableError if the shard does not answer, or discarded the partition.
    """

    def describe(self) -> FrozenDescription: ...
    def read(self, kind: str, span: ByteRange) -> Iterator[FrozenBytes]: ...


class PeerShard:
    """Another server's partition.

    current: read its current partition instead of the one before a reshard.
    channel: the connection; the caller closes it.
    nbytes: bytes received so far.
    """

    def __init__(
        self, address: str, job: str, log_id: int = 0, index: int = 0, current: bool = False
    ) -> None:
        self.nbytes = 0
        self._address = address
        self.channel = open_channel(Endpoint(address), tensors=True)
        self._read = Stub(self.channel, READ_SHARD)
        self._template = pb.ReadShardRequest(job=job, epoch=log_id, index=index, current=current)

    @property
    def version(self) -> int:
        """The version of its current weights."""
        for response in self._request_bytes("", ByteRange(0, 0)):
            return response.holding.version
        raise UnreachableError(
            f"the server at {self._address} returned no description", "NOT_READY"
        )

    def describe(self) -> FrozenDescription:
        for response in self._request_bytes("", ByteRange(0, 0)):
            holding = response.holding
            scalars = scalars_from_json(holding.scalars_json)
            return FrozenDescription(
                frozenset(holding.kinds), dict(holding.steps), holding.groups_json, scalars
            )
        return FrozenDescription(frozenset(), {}, "", {})

    def read(self, kind: str, span: ByteRange) -> Iterator[FrozenBytes]:
        for response in self._request_bytes(kind, span):
            self.nbytes += len(response.data)
            yield FrozenBytes(response.start, memoryview(response.data))

    def _request_bytes(self, kind: str, span: ByteRange) -> Iterator[pb.ReadShardResponse]:
        request = pb.ReadShardRequest(kind=kind, start=span.start, stop=span.stop)
        request.MergeFrom(self._template)
        with translated(f"the server at {self._address} (ReadShard)"):
            yield from self._read(
                request, timeout=CALL_TIMEOUT_SECONDS + span.nbytes / MIN_BYTES_PER_SECOND
            )


class ReshardReader:
    """Reads the flat buffer from the previous shards (implements PartReader).

    sources: by shard number; only those that overlap `needed` are asked.
    needed: the ranges that will be read.
    """

    def __init__(
        self, plan: PartitionPlan, sources: Sequence[PreviousShard], needed: Sequence[ByteRange]
    ) -> None:
        self._plan = plan
        needed_sources = {shard for span in needed for shard in self._find_sources(span)} or {0}
        self._sources = dict(enumerate(sources))
        self._descriptions = {
            shard: self._sources[shard].describe() for shard in sorted(needed_sources)
        }

    def kinds(self) -> set[str]:
        return {kind for description in self._descriptions.values() for kind in description.kinds}

    def steps(self) -> dict[int, int]:
        return {
            tensor: count
            for description in self._descriptions.values()
            for tensor, count in description.steps.items()
        }

    def scalars(self) -> Scalars:
        merged: dict[str, dict[int, float]] = {}
        for description in self._descriptions.values():
            for name, values in description.scalars.items():
                merged.setdefault(name, {}).update(values)
        return merged

    def groups_json(self) -> str:
        """Return the hyper-parameters of the groups, which are equal on all shards."""
        return next(iter(self._descriptions.values())).groups_json

    def read(self, kind: str, start: int, stop: int, out: memoryview) -> bool:
        """Fill `out` with bytes [start, stop) of the flat buffer; padding becomes zeros.

        Returns False if some bytes are missing. Raises SnapshotError if these are weights.
        """
        span, target, found = ByteRange(start, stop), out.cast("B"), []
        for shard in self._find_sources(span):
            for piece in self._sources[shard].read(kind, span):
                found.append(ByteRange(piece.start, piece.start + piece.data.nbytes))
                target[piece.start - start : found[-1].stop - start] = piece.data
        gaps = list(_gaps(span, found))
        for gap in gaps:
            target[gap.start - start : gap.stop - start] = bytes(gap.nbytes)
        missing = [tensor for gap in gaps for tensor in self._plan.slices(gap)]
        if missing and kind == "weight":
            raise SnapshotError(
                f"no shard has all weights of {self._plan.spec.tensors[missing[0].tensor].name}"
            )
        return not missing

    def _find_sources(self, span: ByteRange) -> list[int]:
        plan = self._plan
        return [
            s
            for s in range(plan.shards)
            if any(_overlap(plan.range(s, role), span) for role in ROLES)
        ]


def needed_by(plan: PartitionPlan, shard: int) -> list[ByteRange]:
    """Return all ranges of a shard."""
    return [plan.range(shard, role) for role in ROLES]


def _overlap(one: ByteRange, other: ByteRange) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


def _gaps(span: ByteRange, found: Sequence[ByteRange]) -> Iterator[ByteRange]:
    position = span.start
    for start, stop in sorted(found):
        if position < start:
            yield ByteRange(position, start)
        position = max(position, stop)
    if position < span.stop:
        yield ByteRange(position, span.stop)


def build_partition(
    engine: ShardEngine, addresses: Sequence[str], job: str, log_id: int, index: int
) -> tuple[int, str]:
    """Build the shard's new partition from the shards at these addresses. Repeating it is harmless.

    Args:
        addresses: Address of every shard before the reshard, by shard number; empty if unknown.
        log_id, index: The Reshard entry.

    Returns the bytes received from other shards, and why the partition could not be built (empty if
    the shard has it).
    """
    if not all(addresses):
        return 0, "not all servers have connected yet"
    with ExitStack() as stack:
        peers = [PeerShard(address, job, log_id, index) for address in addresses]
        for peer in peers:
            stack.enter_context(peer.channel)
        try:
            sources: list[PreviousShard] = list(peers)
            if engine.live.shard < len(peers):
                sources[engine.live.shard] = engine.live.wait_for_frozen(log_id, index)
            if (pending := engine.prepare_partition(index)) is not None:
                needed = needed_by(pending.store.plan, engine.live.shard)
                plan = PartitionPlan(pending.store.plan.spec, len(sources))
                pending.store.restore(ReshardReader(plan, sources, needed))
                engine.install_partition(pending)
        except (UnreachableError, SnapshotError) as error:
            return 0, str(error)
        return sum(peer.nbytes for peer in peers), ""
