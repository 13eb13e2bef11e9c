"""Planted bugs in decisions of shard 0 about servers; see mutants.py."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import psserver.core.servers.shard_directory as directory_module
import tests.sim.world as world_module
from pscommon.core.log_entries import ShardReport
from psserver.core.commands.recorder import Recorder
from psserver.core.commands.shard_commands import RestartShard
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.job.policy import policy
from psserver.core.servers.catch_up import CatchUp
from psserver.core.servers.server_entry import (
    Delivery,
    DeliveryCursor,
    ReportDecision,
    ServerEntry,
)
from psserver.core.servers.shard_directory import ShardDirectory
from psserver.core.servers.shard_protocol import finish_snapshot, start_reshard
from tests.sim.scenario import SHRINK, Scenario

Directory = ShardDirectory[Any]
CHOOSE = directory_module.choose_catch_up
NEXT_DELIVERY = ShardDirectory.next_delivery
RECORD_REPORT = ShardDirectory.record_report
CONNECT = ShardDirectory.connect


def always_follow(
    coordinator: CoordinatorMachine,
    report: ShardReport,
    blank: bool,
    can_recover: bool,
    restores: bool,
) -> CatchUp:
    """Let a shard follow although it lacks entries, or pushes that entries count."""
    if report.log_id == coordinator.job.log_id and not blank:
        return CatchUp.FOLLOW
    return CHOOSE(coordinator, report, blank, can_recover, restores)


def never_roll_back(
    coordinator: CoordinatorMachine,
    report: ShardReport,
    blank: bool,
    can_recover: bool,
    restores: bool,
) -> CatchUp:
    """Let a shard without its state restore it alone, without a rollback of the other shards."""
    catch_up = CHOOSE(coordinator, report, blank, can_recover, restores)
    if catch_up is CatchUp.GO_BACK:
        return CatchUp.RESTORE if restores else CatchUp.BEGIN
    return catch_up


def skip_entries(
    directory: Directory,
    server: ServerEntry,
    cursor: DeliveryCursor,
    coordinator: CoordinatorMachine,
) -> Delivery | None:
    """Treat all entries but the newest as received by the shard."""
    advanced = cursor._replace(reached=max(cursor.reached, coordinator.log.index - 1))
    return NEXT_DELIVERY(directory, server, advanced, coordinator)


def omit_catch_up(
    directory: Directory,
    server: ServerEntry,
    cursor: DeliveryCursor,
    coordinator: CoordinatorMachine,
) -> Delivery | None:
    """Deliver entries without the catch-up action."""
    delivery = NEXT_DELIVERY(directory, server, cursor, coordinator)
    return delivery._replace(catch_up=CatchUp.FOLLOW) if delivery is not None else None


def repeat_recovery(
    directory: Directory, server: ServerEntry, *rest: Any, **others: Any
) -> ReportDecision:
    """Ask a shard again and again to recover from a log that cannot be used."""
    decision = RECORD_REPORT(directory, server, *rest, **others)
    server.is_recovery_requested = False
    return decision


def ignore_new_process(
    directory: Directory, shard: int, *rest: Any, **others: Any
) -> tuple[ServerEntry, bool]:
    """Treat the new process of a shard as its previous process."""
    return CONNECT(directory, shard, *rest, **others)[0], False


def trust_previous_reports(
    recorder: Recorder, directory: Directory, server: ServerEntry, now: float
) -> bool:
    """After a failover, assume that the new primary holds what the old primary reported."""
    if directory.is_member(server):
        recorder.do(RestartShard(server.shard), now)
    return False


def ignore_failed_snapshot(
    recorder: Recorder, now: float, is_written: bool, has_logs: bool
) -> None:
    """End a reshard although its snapshot failed and logs continue from the previous snapshot."""
    finish_snapshot(recorder, now, True, has_logs)


def omit_shard_count(
    recorder: Recorder,
    directory: Directory,
    shards: int,
    writes_snapshot: bool,
    store_count: Callable[[int], None],
    now: float,
) -> bool:
    """Begin a reshard without storing the new number of shards for a restarted server."""
    return start_reshard(recorder, directory, shards, writes_snapshot, lambda shards: None, now)


def never_release(directory: Directory, coordinator: CoordinatorMachine) -> bool:
    """Do not end the servers that a reshard has removed."""
    return False


def with_lagging_standbys(scenario: Scenario) -> Scenario:
    return replace(
        scenario,
        policy=policy("async"),
        has_log=True,
        has_lagging_standbys=True,
        standbys=6,
        server_kills=3,
        reshards=0,
        shards=3,
        on_loss=SHRINK,
    )


def sync_with_lagging_standbys(scenario: Scenario) -> Scenario:
    """Under sync a push is often pending when a server is killed."""
    return replace(
        with_lagging_standbys(scenario),
        policy=policy("sync"),
        workers=3,
        standbys=20,
        server_kills=0,
        message_loss=0.15,
    )


def resharded_with_logs(scenario: Scenario) -> Scenario:
    return replace(
        scenario, has_log=True, has_lagging_standbys=False, standbys=0, reshards=4, server_kills=4
    )


def killed_without_logs(scenario: Scenario) -> Scenario:
    return replace(
        scenario, has_log=False, shards=3, server_kills=3, snapshot_interval=2, standbys=0
    )


SCENARIOS: Mapping[str, Callable[[Scenario], Scenario]] = {
    "a shard follows although it lacks entries": with_lagging_standbys,
    "reports of the old primary count after a failover": sync_with_lagging_standbys,
    "a shard never stops reading an unusable log": with_lagging_standbys,
    "a reshard ends without its snapshot": resharded_with_logs,
    "a new process is treated as the previous one": resharded_with_logs,
    "a shard restores its state without a rollback": killed_without_logs,
}

PATCHES: dict[str, tuple[Any, str, Any]] = {
    "a shard follows although it lacks entries": (
        directory_module,
        "choose_catch_up",
        always_follow,
    ),
    "a shard restores its state without a rollback": (
        directory_module,
        "choose_catch_up",
        never_roll_back,
    ),
    "missing entries are not sent": (ShardDirectory, "next_delivery", skip_entries),
    "a catch-up action is not sent": (ShardDirectory, "next_delivery", omit_catch_up),
    "a shard never stops reading an unusable log": (
        ShardDirectory,
        "record_report",
        repeat_recovery,
    ),
    "a new process is treated as the previous one": (ShardDirectory, "connect", ignore_new_process),
    "reports of the old primary count after a failover": (
        world_module,
        "replace_process",
        trust_previous_reports,
    ),
    "a reshard ends without its snapshot": (
        world_module,
        "finish_snapshot",
        ignore_failed_snapshot,
    ),
    "the new number of shards is not stored": (world_module, "start_reshard", omit_shard_count),
    "removed servers do not end": (ShardDirectory, "release_leavers", never_release),
}
