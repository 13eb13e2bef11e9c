"""How a shard that connects comes to follow the job's log."""

from enum import Enum, auto

from pscommon.core.log_entries import ShardReport
from psserver.core.job.coordinator import CoordinatorMachine


class CatchUp(Enum):
    """FOLLOW: from where it stands. RECOVER: it is to read its own log of this epoch first.
    RESTORE: it is to load the snapshot that this epoch began with. BEGIN: it has nothing, and
    needs nothing. ADOPT: it is new in a move, and is to know what others know. GO_BACK: it can
    only follow if all shards go back to a snapshot together."""

    FOLLOW = auto()
    RECOVER = auto()
    RESTORE = auto()
    BEGIN = auto()
    ADOPT = auto()
    GO_BACK = auto()


def way_for(
    coordinator: CoordinatorMachine,
    report: ShardReport,
    blank: bool,
    can_recover: bool,
    restores: bool,
) -> CatchUp:
    """For a shard that does not follow yet, by its first report.

    blank: it has not followed any log since it was started. can_recover: it may have a log on
    disk that it has not been asked to read; one of this epoch only where it followed it.
    restores: this epoch began with a snapshot.
    """
    if report.epoch == coordinator.epoch and not blank:
        fits = coordinator.log.can_go_on(report) and not coordinator.is_stranded(report)
        return CatchUp.FOLLOW if fits else CatchUp.GO_BACK
    if blank and coordinator.move is not None and report.shard >= coordinator.move.before:
        return CatchUp.ADOPT  # it had nothing before the move
    followed = report.shard in coordinator.followers
    if blank and can_recover and followed:
        return CatchUp.RECOVER
    if coordinator.begun and followed:
        return CatchUp.GO_BACK  # it had numbers of this epoch, and has lost them
    return CatchUp.RESTORE if restores else CatchUp.BEGIN
