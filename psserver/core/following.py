"""How a shard that connects comes to follow the job's log."""

from enum import Enum, auto

from pscommon.core.log import Report
from psserver.core.coordinator import Coordinator


class Way(Enum):
    """FOLLOW: from where it stands. RECOVER: it is to read its own log of this epoch first. RESTORE: it is to load the
    snapshot that this epoch began with. BEGIN: it has nothing, and needs nothing. ADOPT: it is new in a move,
    and is to know what others know. GO_BACK: it can only follow if all shards go back to a snapshot together."""

    FOLLOW = auto()
    RECOVER = auto()
    RESTORE = auto()
    BEGIN = auto()
    ADOPT = auto()
    GO_BACK = auto()


def way_for(coordinator: Coordinator, report: Report, blank: bool, can_recover: bool, restores: bool) -> Way:
    """For a shard that does not follow yet, by its first report.

    blank: it has not followed any log since it was started. can_recover: it may have a log on disk that it has not been
    asked to read; one of this epoch only where it followed it. restores: this epoch began with a snapshot.
    """
    if report.epoch == coordinator.epoch and not blank:
        fits = coordinator.log.can_go_on(report) and not coordinator.is_stranded(report)
        return Way.FOLLOW if fits else Way.GO_BACK
    if blank and coordinator.move is not None and report.shard >= coordinator.move.before:
        return Way.ADOPT  # it had nothing before the move
    followed = report.shard in coordinator.followers
    if blank and can_recover and followed:
        return Way.RECOVER
    if coordinator.begun and followed:
        return Way.GO_BACK  # it had numbers of this epoch, and has lost them
    return Way.RESTORE if restores else Way.BEGIN
