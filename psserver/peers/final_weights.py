"""Write the job's final weights as one file (`--save`): shard 0 collects them from all shards."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from pscommon.core.errors import NotSavedError, PSError, UnreachableError
from pscommon.core.model_spec import ROLES, ModelSpec
from pscommon.core.partition import ByteRange, PartitionPlan
from pscommon.snapshot import tensors_in_buffer, write_model
from psserver.parameters.frozen_shard import FrozenBytes, FrozenDescription, FrozenShard
from psserver.peers.resharding import PeerShard
from psserver.shard.live_state import LiveShardState

SAME_VERSION_TIMEOUT_SECONDS = 10.0
"""Seconds that shards may take to reach one version: entries, or pushes of running workers, may
still be on their way.
"""

RETRY_INTERVAL_SECONDS = 0.1

CHUNK_BYTES = 64 << 20
"""Bytes copied at a time while nothing is applied."""


class LocalShard:
    """The current weights of this process's shard. Raises UnreachableError without weights."""

    def __init__(self, live: LiveShardState) -> None:
        self._live = live

    @property
    def version(self) -> int:
        with self._live.lock_weights(0) as (version, _):
            return version

    def describe(self) -> FrozenDescription:
        with self._live.lock_weights(0) as (_, store):
            return FrozenShard(0, 0, self._live.shards, store).describe()

    def read(self, kind: str, span: ByteRange) -> Iterator[FrozenBytes]:
        """Yield copies: the weights may change as soon as this returns."""
        with self._live.lock_weights(0) as (_, store):
            pieces = FrozenShard(0, 0, self._live.shards, store).read(kind, span)
            copies = [FrozenBytes(piece.start, memoryview(bytes(piece.data))) for piece in pieces]
        yield from copies


def write_final_weights(
    live: LiveShardState,
    addresses: Sequence[str],
    job: str,
    model: ModelSpec,
    path: Path,
    seconds: float = SAME_VERSION_TIMEOUT_SECONDS,
) -> None:
    """Write all tensors of the newest version, the same on all shards, under all their names.

    A file at `path` is replaced only by a complete one. Needs memory for all weights.

    Args:
        live: The state of shard 0.
        addresses: Address of every shard; the first is this process.
        seconds: Time for the shards to reach one version.

    Raises NotSavedError if the file was not written.
    """
    plan = PartitionPlan(model, len(addresses))
    with ExitStack() as stack:
        sources: list[LocalShard | PeerShard] = [LocalShard(live)]
        for address in addresses[1:]:
            peer = PeerShard(address, job, current=True)
            stack.enter_context(peer.channel)
            sources.append(peer)
        try:
            write_model(
                path, model, tensors_in_buffer(plan, _read_one_version(plan, sources, seconds))
            )
        except PSError as error:
            raise NotSavedError(f"--save {path}: {error}") from error


def _read_one_version(
    plan: PartitionPlan, sources: Sequence[LocalShard | PeerShard], seconds: float
) -> bytearray:
    """Return a flat buffer of one version, read while no shard changed its version."""
    deadline, timer = time.monotonic() + seconds, threading.Event()
    while True:
        versions = [source.version for source in sources]
        if len(set(versions)) == 1:
            buffer = _read_all(plan, sources)
            if [source.version for source in sources] == versions:
                return buffer
        if time.monotonic() >= deadline:
            raise UnreachableError(
                f"the shards are at versions {versions} after {seconds:g} s", "NOT_READY"
            )
        timer.wait(RETRY_INTERVAL_SECONDS)


def _read_all(plan: PartitionPlan, sources: Sequence[LocalShard | PeerShard]) -> bytearray:
    buffer = bytearray(plan.nbytes)
    for shard, source in enumerate(sources):
        for role in ROLES:
            start, stop = plan.range(shard, role)
            for first in range(start, stop, CHUNK_BYTES):
                for piece in source.read(
                    "weight", ByteRange(first, min(first + CHUNK_BYTES, stop))
                ):
                    buffer[piece.start : piece.start + piece.data.nbytes] = piece.data
    return buffer
