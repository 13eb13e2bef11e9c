"""Description of the processes or events that a job waits for."""

from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.workers.members import Member

MAX_NAMED_COUNT = 3


def waiting_for(coordinator: CoordinatorMachine, now: float) -> str:
    """Return a phrase for people; empty if the job waits for nothing."""
    if not coordinator.begun:
        uploader = coordinator.job.uploader
        return (
            f"the initial weights from {uploader}" if uploader else "a worker to register a model"
        )
    if not coordinator.started:
        here = len(coordinator.membership.registered())
        return f"workers: {here} of --min-workers {coordinator.job.min_workers} are here"
    members = late(coordinator)
    named = [
        f"{member}, {_silence(coordinator, member, now)}" for member in members[:MAX_NAMED_COUNT]
    ]
    return ", ".join(named) + (
        f" and {len(members) - MAX_NAMED_COUNT} more" if len(members) > MAX_NAMED_COUNT else ""
    )


def _silence(coordinator: CoordinatorMachine, member: Member, now: float) -> str:
    if coordinator.membership.leases.is_hanging(member):
        return f"whose script has made no call for {member.no_call_seconds:.0f} s"
    return f"silent for {now - member.last_contact_at:.1f} s"


def late(coordinator: CoordinatorMachine) -> list[Member]:
    """Return the active workers whose push would unblock the others."""
    active, ready = coordinator.membership.active(), coordinator.pending.ready_workers
    if not ready or not coordinator.started:
        return []
    if coordinator.policy.barrier:
        return [member for member in active if member.worker not in ready]
    if coordinator.policy.bound is None:
        return []
    slowest = min((member.clock for member in active), default=0)
    return [member for member in active if member.clock == slowest]
