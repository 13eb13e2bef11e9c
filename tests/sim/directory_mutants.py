"""Bugs planted in what shard 0 decides about servers, as in mutants.py."""

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


def follows_anyway(
    coordinator: CoordinatorMachine,
    report: ShardReport,
    blank: bool,
    can_recover: bool,
    restores: bool,
) -> CatchUp:
    """Lets a shard follow that lacks entries, or pushes that entries count."""
    if report.log_id == coordinator.log_id and not blank:
        return CatchUp.FOLLOW
    return CHOOSE(coordinator, report, blank, can_recover, restores)


def restores_anyway(
    coordinator: CoordinatorMachine,
    report: ShardReport,
    blank: bool,
    can_recover: bool,
    restores: bool,
) -> CatchUp:
    """Lets a shard that has lost its state begin alone, while the others go on."""
    catch_up = CHOOSE(coordinator, report, blank, can_recover, restores)
    if catch_up is CatchUp.GO_BACK:
        return CatchUp.RESTORE if restores else CatchUp.BEGIN
    return catch_up


def skips_an_entry(
    directory: Directory,
    server: ServerEntry,
    cursor: DeliveryCursor,
    coordinator: CoordinatorMachine,
) -> Delivery | None:
    """Takes what a shard has not received yet for received."""
    late = cursor._replace(reached=max(cursor.reached, coordinator.log.index - 1))
    return NEXT_DELIVERY(directory, server, late, coordinator)


def forgets_the_action(
    directory: Directory,
    server: ServerEntry,
    cursor: DeliveryCursor,
    coordinator: CoordinatorMachine,
) -> Delivery | None:
    """Does not tell a shard how it can follow."""
    delivery = NEXT_DELIVERY(directory, server, cursor, coordinator)
    return delivery._replace(catch_up=CatchUp.FOLLOW) if delivery is not None else None


def reads_its_log_again(
    directory: Directory, server: ServerEntry, *rest: Any, **others: Any
) -> ReportDecision:
    """Asks a shard whose log cannot be used to read it again, for ever."""
    decision = RECORD_REPORT(directory, server, *rest, **others)
    server.is_recovery_requested = False
    return decision


def knows_every_process(
    directory: Directory, shard: int, *rest: Any, **others: Any
) -> tuple[ServerEntry, bool]:
    """Takes a shard's new process for the old one."""
    return CONNECT(directory, shard, *rest, **others)[0], False


def believes_the_predecessor(
    recorder: Recorder, directory: Directory, server: ServerEntry, now: float
) -> bool:
    """Believes after a failover that the new primary has what the old one had reported."""
    if directory.is_member(server):
        recorder.do(RestartShard(server.shard), now)
    return False


def ends_without_snapshot(recorder: Recorder, now: float, is_written: bool, has_logs: bool) -> None:
    """Ends a reshard though its snapshot failed and logs go on from the one before."""
    finish_snapshot(recorder, now, True, has_logs)


def stores_no_count(
    recorder: Recorder,
    directory: Directory,
    shards: int,
    writes_snapshot: bool,
    store_count: Callable[[int], None],
    now: float,
) -> bool:
    """Begins a reshard of which a restarted server does not learn."""
    return start_reshard(recorder, directory, shards, writes_snapshot, lambda shards: None, now)


def never_releases(directory: Directory, coordinator: CoordinatorMachine) -> bool:
    """Keeps the servers that a reshard has removed."""
    return False


def lagging(scenario: Scenario) -> Scenario:
    return replace(
        scenario,
        policy=policy("async"),
        durable=True,
        lag=True,
        standbys=6,
        server_kills=3,
        reshards=0,
        shards=3,
        on_loss=SHRINK,
    )


def lagging_rounds(scenario: Scenario) -> Scenario:
    """Pushes wait for each other, so one is often pending when a server dies."""
    return replace(
        lagging(scenario), policy=policy("sync"), workers=3, standbys=20, server_kills=0, loss=0.15
    )


def moved_with_logs(scenario: Scenario) -> Scenario:
    return replace(scenario, durable=True, lag=False, standbys=0, reshards=4, server_kills=4)


def killed_without_logs(scenario: Scenario) -> Scenario:
    return replace(scenario, durable=False, shards=3, server_kills=3, every=2, standbys=0)


SCENARIOS: Mapping[str, Callable[[Scenario], Scenario]] = {
    "a shard that lacks entries follows": lagging,
    "reports outlive a failover": lagging_rounds,
    "a log that cannot be used is read again": lagging,
    "a reshard ends without its snapshot": moved_with_logs,
    "a new process counts as the old one": moved_with_logs,
    "a shard begins alone": killed_without_logs,
}

PATCHES: dict[str, tuple[Any, str, Any]] = {
    "a shard that lacks entries follows": (directory_module, "choose_catch_up", follows_anyway),
    "a shard begins alone": (directory_module, "choose_catch_up", restores_anyway),
    "entries that a shard lacks are not sent": (ShardDirectory, "next_delivery", skips_an_entry),
    "a shard is not told how to follow": (ShardDirectory, "next_delivery", forgets_the_action),
    "a log that cannot be used is read again": (
        ShardDirectory,
        "record_report",
        reads_its_log_again,
    ),
    "a new process counts as the old one": (ShardDirectory, "connect", knows_every_process),
    "reports outlive a failover": (world_module, "replace_process", believes_the_predecessor),
    "a reshard ends without its snapshot": (
        world_module,
        "finish_snapshot",
        ends_without_snapshot,
    ),
    "a reshard without a stored number": (world_module, "start_reshard", stores_no_count),
    "servers outlive a reshard": (ShardDirectory, "release_leavers", never_releases),
}
