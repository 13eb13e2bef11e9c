"""How a connected shard reaches the state from which it can follow the log, and when a failover
makes all shards roll back.
"""

from enum import Enum, auto

from pscommon.core.log_entries import ShardReport
from psserver.core.coordinator.machine import CoordinatorMachine


class CatchUp(Enum):
    """What a shard does before it follows the log.

    FOLLOW: Nothing; it continues at its index.
    RECOVER: Replay its own log on disk first.
    RESTORE: Load the snapshot with which this log began.
    BEGIN: Start without weights.
    ADOPT: New shard in a reshard: copy the state machine from a peer, load weights later.
    GO_BACK: It cannot follow; all shards return to a snapshot together.
    """

    FOLLOW = auto()
    RECOVER = auto()
    RESTORE = auto()
    BEGIN = auto()
    ADOPT = auto()
    GO_BACK = auto()


def promotion_needs_rollback(
    coordinator: CoordinatorMachine, own_report: ShardReport, newest_version: int
) -> bool:
    """Return whether shards may have more than a coordinator that a standby has replicated.

    Args:
        own_report: Report of the standby's own shard.
        newest_version: Version of the newest snapshot on disk that others may continue from.
    """
    return newest_version > coordinator.job.version or not coordinator.log.can_go_on(own_report)


def choose_catch_up(
    coordinator: CoordinatorMachine,
    report: ShardReport,
    blank: bool,
    can_recover: bool,
    restores: bool,
) -> CatchUp:
    """Return the action for a shard that does not follow yet.

    Args:
        coordinator: The coordinator.
        report: The shard's first report.
        blank: The shard's process has not followed any log.
        can_recover: The shard may have a log on disk that it was not asked to replay.
        restores: This log began with a snapshot.
    """
    if report.log_id == coordinator.job.log_id and not blank:
        fits = coordinator.log.can_go_on(report) and not coordinator.resharding.is_stranded(report)
        return CatchUp.FOLLOW if fits else CatchUp.GO_BACK
    if (
        blank
        and coordinator.job.reshard is not None
        and report.shard >= coordinator.job.reshard.before
    ):
        return CatchUp.ADOPT  # it had no part before the reshard
    followed = report.shard in coordinator.job.followers
    if blank and can_recover and followed:
        return CatchUp.RECOVER
    if coordinator.job.begun and followed:
        return CatchUp.GO_BACK  # it had weights of this log, and has lost them
    return CatchUp.RESTORE if restores else CatchUp.BEGIN
