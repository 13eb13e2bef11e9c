"""Builds shard 0, which also runs the coordinator."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Never

from psserver.coordinator.service import CoordinatorService
from psserver.durability.state_records import StateRecord
from psserver.process.config import ServerConfig
from psserver.process.identity import ServerIdentity
from psserver.process.job_files import (
    JobIdFile,
    ShardCountFile,
    generate_job_name,
    store_job_key,
    stored_job_key,
)
from psserver.replication.hello import whole_state
from psserver.replication.standby_state import Promotion
from psserver.roles.primary import STATE_COPY_TIMEOUT_SECONDS, Primary, Role, open_primary


def build_coordinator(
    config: ServerConfig,
    promotion: Promotion | None,
    lost_data_dir: str,
    deposed: Callable[[str], Never],
    resources: ExitStack,
) -> Role:
    """Build shard 0. Arguments as in `open_primary` and CoordinatorService."""
    # before the port is bound: a second attempt without this disk needs it
    shard_count = read_shard_count(config, promotion)
    primary = open_primary(config, promotion, deposed, resources)
    identity = _make_identity(primary, shard_count.shards)
    if promotion is None:
        if config.resume != "never":
            primary.snapshots.check_data_dir()
        primary.snapshots.generations.count()
    service = CoordinatorService(
        config,
        shard_count,
        identity,
        partial(primary.make_engine, shard_count.shards),
        primary.states,
        primary.snapshots,
        primary.metrics,
        primary.replicator,
        lost_data_dir,
    )
    resources.callback(service.history.journal.close)  # when no call is in progress any more

    def copy_state(begin: Callable[[Iterable[StateRecord]], None]) -> None:
        with (
            service.history.paused() as (facts, job),
            service.engine.live.export_state(STATE_COPY_TIMEOUT_SECONDS) as shard,
        ):
            begin(whole_state(config, identity, shard, facts, job))

    return Role(primary, identity, service.engine, copy_state, service=service)


def read_shard_count(config: ServerConfig, promotion: Promotion | None) -> ShardCountFile:
    """Return the number of shards, which shard 0 decides and the others learn from it."""
    shard_count = ShardCountFile(config.shards, config.data_dir)
    standby_state = promotion.standby_state if promotion is not None else None
    # the coordinator decides, so it knows before its shard
    if standby_state is not None and standby_state.coordinator is not None:
        facts = standby_state.hello.facts
        assert facts is not None
        shard_count.take_over(facts.shard_count, standby_state.coordinator.job.shards)
    return shard_count


def _make_identity(primary: Primary, shards: int) -> ServerIdentity:
    config, promotion, name = primary.config, primary.promotion, JobIdFile(primary.config.data_dir)
    replicated = promotion.standby_state.hello.job if promotion is not None else ""
    bound = replicated or config.job or name.stored_job
    if promotion is None and config.resume != "never":
        name.check(bound)
    identity = primary.make_identity(shards, bound or generate_job_name(), bound, name)
    keys = identity.worker_keys
    if promotion is not None and promotion.standby_state.hello.job_key:
        store_job_key(config.data_dir, keys.job_key)  # that of the former primary
    else:
        keys.learn(stored_job_key(config.data_dir, keys.job_key))
    return identity
