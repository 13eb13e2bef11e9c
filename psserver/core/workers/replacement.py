"""Which worker replaces which: a launcher restarts a worker, and the new one takes its place."""

from collections.abc import Iterable

from psserver.core.workers.members import Member

MAX_HEARTBEAT_DELAY_SECONDS = 2.5
"""How late a heartbeat can arrive: on its way, or in a server that was stopped for a moment."""


def predecessor(registered: Iterable[Member], member: Member) -> Member | None:
    """Return the worker whose place a registering member takes.

    It has the member's rank, and is missing or an earlier attempt of the same launcher. Without
    ranks it is the first worker that is missing.
    """
    for other in _peers(registered, member):
        if other.missing_since is not None or (member.ranked and member.attempt > other.attempt):
            return other
    return None


def successor(registered: Iterable[Member], member: Member) -> Member | None:
    """Return a later attempt of this member's launcher: the member's request comes too late."""
    peers = _peers(registered, member) if member.ranked else []
    return next((other for other in peers if other.attempt > member.attempt), None)


def unresolved_peer(registered: Iterable[Member], member: Member, asked_at: float) -> Member | None:
    """Return a worker of which it is open whether one of the two replaces the other.

    It is open as long as nothing shows that the older one was alive after the newer one joined.
    A message that arrives shortly after that may have been sent before.

    asked_at: When the member asked to register.
    """
    for other in _peers(registered, member):
        last_contact, joined = other.last_seen, member.joined_at
        if other.worker > member.worker:
            last_contact, joined = asked_at, other.joined_at
        if last_contact <= joined + MAX_HEARTBEAT_DELAY_SECONDS:
            return other
    return None


def _peers(registered: Iterable[Member], member: Member) -> list[Member]:
    """Return the registered workers whose place this member could take."""
    return [
        other
        for other in registered
        if other is not member
        and other.ranked == member.ranked
        and (other.rank == member.rank or not member.ranked)
    ]
