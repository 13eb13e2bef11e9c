"""Automatic scaling: the policy sees the job, and its decisions become commands."""

from psserver.core.commands.job_commands import WantWorkers
from psserver.core.commands.recorder import Recorder
from psserver.core.commands.worker_commands import DrainWorker
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.job.worker_scaling import Decision, Observation, WorkerScaling


def scale(recorder: Recorder, scaling: WorkerScaling, now: float) -> Decision | None:
    """Let the policy see the job, carry out its decision, and return it.

    A straggler is asked to leave in the same moment, so that no launcher sees one without the
    other and lets a second worker go.
    """
    job = recorder.coordinator.job
    if not job.started or job.failure is not None or job.reshard is not None:
        return None
    decision = scaling.observe(observe(recorder.coordinator), now)
    if decision is not None:
        if decision.straggler is not None:
            recorder.do(DrainWorker(decision.straggler), now)
        recorder.do(WantWorkers(decision.wanted, decision.reason), now)
    return decision


def observe(coordinator: CoordinatorMachine) -> Observation:
    """Return what the policy sees of the job."""
    job = coordinator.job
    paces = {
        member.worker: member.step_timer.median_seconds
        for member in job.membership.registered()
        if not member.draining
    }
    wanted = job.workers_wanted or len(paces)
    return Observation(wanted, paces, job.samples, job.counts["applied"])
