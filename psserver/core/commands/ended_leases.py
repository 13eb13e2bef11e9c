"""What happens to a worker whose lease has ended: it is removed, or its place is kept for a while
(`--on-worker-loss`).
"""

from psserver.core.commands.command import Command
from psserver.core.commands.worker_commands import EndAbsence, KeepPlace, Lose
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.workers.members import Member

HUNG = "--progress-timeout: its script made no call"
"""Start of the reason for which a hanging worker is lost."""


def choose_for_ended_leases(
    coordinator: CoordinatorMachine, now: float
) -> list[tuple[Member, Command[None]]]:
    """Return the members whose leases have ended or run again, and what to do about each."""
    membership, on_loss = coordinator.membership, coordinator.job.rules.on_loss
    if coordinator.failure is not None:
        return []  # members are to learn of the failure, not that they are fenced
    expired = membership.leases.ended(now)
    late: list[tuple[Member, Command[None]]] = [
        (m, EndAbsence(m.worker))
        for m in membership.current()
        if m.missing_since is not None and m not in expired
    ]
    for member in expired:
        reason = (
            member.death
            or f"nothing heard from it for {now - member.last_contact_at:.1f} s; its lease ended"
        )
        if on_loss.mode != "wait" or not member.is_registered:
            late.append((member, Lose(member.worker, reason)))
        elif member.missing_since is None:
            late.append((member, KeepPlace(member.worker)))
        elif now - member.missing_since >= on_loss.seconds:
            waited = f"no worker took its place within {on_loss.seconds:g} s"
            late.append((member, Lose(member.worker, f"{reason}, and {waited}")))
    return late + [
        (member, Lose(member.worker, f"{HUNG} for {member.heartbeat.no_call_seconds:.1f} s"))
        for member in membership.leases.over_progress_timeout()
        if member not in expired
    ]
