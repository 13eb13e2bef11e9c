"""The job's weights as one file (`--save`), collected by shard 0 from all shards as the job
ends.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from pscommon.core.errors import NotSavedError, PSError, UnreachableError
from pscommon.core.model_spec import ROLES, ModelSpec
from pscommon.core.partition import ByteRange, PartitionPlan
from pscommon.snapshot import tensors_on_tape, write_model
from psserver.parameters.frozen_shard import FrozenBytes, FrozenDescription, FrozenShard
from psserver.shard.engine import ShardEngine
from psserver.shard.reshard_reader import PeerShard

SETTLE_SECONDS = 10.0
"""How long shards may take to come to one version: entries, or pushes of workers that still run,
are on their way.
"""

PAUSE_SECONDS = 0.1

CHUNK_BYTES = 64 << 20
"""Copied at a time while nothing is applied."""


class WeightHolder(Protocol):
    """One shard as it is now. Both raise UnreachableError where it is not there."""

    @property
    def version(self) -> int: ...
    def read(self, kind: str, span: ByteRange) -> Iterator[FrozenBytes]: ...


class OwnShard:
    """What this process's shard holds now. NOT_READY: it has no weights."""

    def __init__(self, engine: ShardEngine) -> None:
        self._engine = engine

    @property
    def version(self) -> int:
        with self._engine.standing(0) as (version, _):
            return version

    def about(self) -> FrozenDescription:
        with self._engine.standing(0) as (_, store):
            return FrozenShard(0, 0, self._engine.shards, store).about()

    def read(self, kind: str, span: ByteRange) -> Iterator[FrozenBytes]:
        """Copies: the weights may change as soon as this returns."""
        with self._engine.standing(0) as (_, store):
            pieces = FrozenShard(0, 0, self._engine.shards, store).read(kind, span)
            copies = [FrozenBytes(piece.start, memoryview(bytes(piece.data))) for piece in pieces]
        yield from copies


def write_final_weights(
    engine: ShardEngine,
    addresses: Sequence[str],
    job: str,
    model: ModelSpec,
    path: Path,
    seconds: float = SETTLE_SECONDS,
) -> None:
    """Write all tensors of the newest version, one version over all shards, under all their
    names.

    addresses: of all shards; the first is this process. NotSavedError; a file at `path` is
    replaced only by a whole one. Needs memory for the weights.
    """
    plan = PartitionPlan(model, len(addresses))
    with ExitStack() as stack:
        holders: list[WeightHolder] = [OwnShard(engine)]
        for address in addresses[1:]:
            peer = PeerShard(address, job, current=True)
            stack.callback(peer.close)
            holders.append(peer)
        try:
            write_model(path, model, tensors_on_tape(plan, _settled(plan, holders, seconds)))
        except PSError as error:
            raise NotSavedError(f"--save {path}: {error}") from error


def _settled(plan: PartitionPlan, holders: Sequence[WeightHolder], seconds: float) -> bytearray:
    """A tape of one version, once all shards are there and stay there while they are read."""
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while True:
        versions = [holder.version for holder in holders]
        if len(set(versions)) == 1:
            tape = _read(plan, holders)
            if [holder.version for holder in holders] == versions:
                return tape
        if time.monotonic() >= deadline:
            raise UnreachableError(
                f"after {seconds:g} s the shards still are at versions {versions}", "NOT_READY"
            )
        pause.wait(PAUSE_SECONDS)


def _read(plan: PartitionPlan, holders: Sequence[WeightHolder]) -> bytearray:
    tape = bytearray(plan.nbytes)
    for shard, holder in enumerate(holders):
        for role in ROLES:
            start, stop = plan.range(shard, role)
            for first in range(start, stop, CHUNK_BYTES):
                for piece in holder.read(
                    "weight", ByteRange(first, min(first + CHUNK_BYTES, stop))
                ):
                    tape[piece.start : piece.start + piece.data.nbytes] = piece.data
    return tape
