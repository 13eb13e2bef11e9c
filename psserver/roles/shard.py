"""Builds a shard that follows the coordinator on shard 0."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Never

from psserver.durability.state_records import StateRecord
from psserver.peers.coordinator_link import CoordinatorLink
from psserver.process.config import ServerConfig
from psserver.process.job_files import JobIdFile, store_job_key, stored_job_key
from psserver.replication.hello import whole_state
from psserver.replication.standby_state import Promotion
from psserver.roles.primary import STATE_COPY_TIMEOUT_SECONDS, Role, open_primary


def build_shard(
    config: ServerConfig,
    promotion: Promotion | None,
    deposed: Callable[[str], Never],
    resources: ExitStack,
) -> Role:
    """Build the shard. It learns the job from shard 0. Arguments as in `open_primary`."""
    standby_state = promotion.standby_state if promotion is not None else None
    shards = standby_state.shard_state.shards if standby_state is not None else config.shards
    primary = open_primary(config, promotion, deposed, resources)
    name = JobIdFile(config.data_dir)
    job = standby_state.hello.job if standby_state is not None else ""
    identity = primary.make_identity(shards, job, job or config.job or name.stored_job, name)
    if promotion is None and config.resume != "never":
        identity.worker_keys.learn(stored_job_key(config.data_dir, b"", config.shard))
    link = CoordinatorLink(
        identity,
        partial(primary.make_engine, shards),
        primary.states,
        primary.snapshots,
        primary.replicator,
        config.join_timeout,
        config.durability == "log",
        config.lanes,
        partial(store_job_key, config.data_dir, shard=config.shard),
    )

    def copy_state(begin: Callable[[Iterable[StateRecord]], None]) -> None:
        with link.engine.live.export_state(STATE_COPY_TIMEOUT_SECONDS) as shard:
            begin(whole_state(config, identity, shard))

    return Role(primary, identity, link.engine, copy_state, link=link)
