"""Build this shard's new partition during a reshard, from the partitions that all shards held
before it.
"""

from collections.abc import Sequence
from contextlib import ExitStack

from pscommon.core.errors import SnapshotError, UnreachableError
from pscommon.core.partition import PartitionPlan
from psserver.peers.reshard_reader import PeerShard, PreviousShard, ReshardReader, needed_by
from psserver.shard.engine import ShardEngine


def build_partition(
    engine: ShardEngine, addresses: Sequence[str], job: str, log_id: int, index: int
) -> tuple[int, str]:
    """Build the shard's new partition from the shards at these addresses. Repeating it is harmless.

    Args:
        engine: The shard.
        addresses: Address of every shard before the reshard, by shard number; empty if unknown.
        job: Name of the job.
        log_id: The log that has the Reshard entry.
        index: Index of the Reshard entry.

    Returns:
        The bytes received from other shards, and why the partition could not be built (empty if
        the shard has it).
    """
    if not all(addresses):
        return 0, "not all servers have connected yet"
    with ExitStack() as stack:
        peers = [PeerShard(address, job, log_id, index) for address in addresses]
        for peer in peers:
            stack.callback(peer.close)
        try:
            sources: list[PreviousShard] = list(peers)
            if engine.live.shard < len(peers):
                sources[engine.live.shard] = engine.live.wait_for_frozen(log_id, index)
            _build(engine, index, sources)
        except (UnreachableError, SnapshotError) as error:
            return 0, str(error)
        return sum(peer.nbytes for peer in peers), ""


def _build(engine: ShardEngine, index: int, sources: Sequence[PreviousShard]) -> None:
    """Raises UnreachableError if a source does not answer, SnapshotError if bytes are missing."""
    pending = engine.prepare_partition(index)
    if pending is None:
        return
    needed = needed_by(pending.store.plan, engine.live.shard)
    plan = PartitionPlan(pending.store.plan.spec, len(sources))
    pending.store.restore(ReshardReader(plan, sources, needed))
    engine.install_partition(pending)
