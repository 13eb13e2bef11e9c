"""Description of the processes or events that a job waits for."""

from collections.abc import Sequence

from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.workers.collectives import CallKey
from psserver.core.workers.members import Member

MAX_NAMED_COUNT = 3


def waiting_for(coordinator: CoordinatorMachine, now: float) -> str:
    """Return a phrase for people; empty if the job waits for nothing."""
    if not coordinator.job.begun:
        uploader = coordinator.job.uploader
        return (
            f"the initial weights from {uploader}" if uploader else "a worker to register a model"
        )
    if not coordinator.job.started:
        here = len(coordinator.membership.registered())
        return f"workers: {here} of --min-workers {coordinator.job.min_workers} are here"
    members = late(coordinator)
    if not members and (calls := coordinator.job.collectives.open):
        return waiting_for_call(coordinator, min(calls), now)
    return _listed([f"{member}, {_silence(coordinator, member, now)}" for member in members])


def _listed(texts: Sequence[str]) -> str:
    more = len(texts) - MAX_NAMED_COUNT
    return ", ".join(texts[:MAX_NAMED_COUNT]) + (f" and {more} more" if more > 0 else "")


def _silence(coordinator: CoordinatorMachine, member: Member, now: float) -> str:
    if coordinator.membership.leases.is_hanging(member):
        return f"whose script has made no call for {member.heartbeat.no_call_seconds:.0f} s"
    return f"silent for {now - member.last_contact_at:.1f} s"


def waiting_for_call(coordinator: CoordinatorMachine, key: CallKey, now: float) -> str:
    """Return a phrase for people about the workers that a collective call waits for."""
    job = coordinator.job
    here = len(coordinator.membership.current())
    if not job.collectives.has_begun and here < job.min_workers:
        return f"workers: {here} of --min-workers {job.min_workers} are here"
    missing = coordinator.collectives.missing(key)
    named = [f"{member}, {_silence(coordinator, member, now)}" for member in missing]
    return f"{key} of {_listed(named)}" if missing else ""


def late(coordinator: CoordinatorMachine) -> list[Member]:
    """Return the active workers whose push would unblock the others."""
    active, ready = coordinator.membership.active(), coordinator.pending.ready.by_worker
    reduction = coordinator.job.reduction
    if reduction.waiting and not reduction.open.number:
        return [member for member in active if member.worker not in reduction.waiting]
    if not ready or not coordinator.job.started:
        return []
    if coordinator.job.policy.barrier:
        return [member for member in active if member.worker not in ready]
    if coordinator.job.policy.bound is None:
        return []
    slowest = min((member.clock for member in active), default=0)
    return [member for member in active if member.clock == slowest]
