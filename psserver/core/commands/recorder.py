"""The command journal: every request that changes the coordinator is recorded for replay.

Theory of operation. The coordinator depends only on its commands and their order (event
sourcing; state machine replication). The recorder carries out each command and writes it to the
journal before any reply leaves. After a crash, `replay` carries out the same commands on the
state of the newest snapshot; a standby carries them out as they arrive.

States: recording, replaying. Events: a request, a shard's report, a tick, the end of a replay.

Invariants:

- Everything that changes a decision is a command, with its time. Heartbeats, status and the check
  for ended leases only read; an ended lease leads to the command Lose. Values that a heartbeat
  reports are a command of their own, at most one a second and worker.
- A repeated request for data that changes nothing and has no answer is not written.
- A Cut is the last command of a segment of the journal. The next segment begins with the state at
  the Cut.
- Requests that no correct process sends are refused before they become commands
  (request_checks.py). A command that raises an unexpected error is still written: the error
  depends only on the command and the state, so a replay meets it at the same place.
- The names and arguments of commands are on disk (recorded.py).
"""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Protocol, TypeVar

from pscommon.core.errors import PSError
from psserver.core.commands.command import Command
from psserver.core.commands.job_commands import Advance, ContinueJob, StartCut, WantWorkers
from psserver.core.commands.recorded import RecordedCommand
from psserver.core.commands.shard_commands import (
    FinishReshard,
)
from psserver.core.commands.worker_commands import (
    DrainWorker,
    EndAbsence,
    ForgetDeparted,
    KeepPlace,
    Leave,
    Lose,
)
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.job.worker_scaling import Decision, Observation, WorkerScaling
from psserver.core.workers.members import Member

Reply = TypeVar("Reply")

MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.3, 1.0
"""A longer time between two ticks means that this process was stopped: a fifth of a lease, within
these bounds.
"""

NO_DEATHS: Mapping[int, str] = MappingProxyType({})

RESHARD_SNAPSHOT_RETRY_SECONDS = 1.0
"""Time until the snapshot that ends a reshard is tried again."""

LOG_REPAIR_INTERVAL_SECONDS = 10.0
"""Least time between two snapshots that are to replace a broken log."""

MAX_DEPARTED_COUNT, MAX_EVICTED_COUNT = 100, 500
"""Departed workers that are kept, and evicted numbers; both may be exceeded for a moment."""

HUNG = "--progress-timeout: its script made no call"
"""Start of the reason for which a hanging worker is lost."""

NOT_WHOLE = "another server took over, and may lack the newest of what the workers were told"
"""Why all workers have to join as new."""


class CommandJournal(Protocol):
    """The log that commands are written to."""

    def write(self, command: Command[object], now: float) -> None:
        """Write a command and its time; its reply leaves after this."""

    def rotate(self, coordinator: CoordinatorMachine) -> None:
        """Begin a segment with the state at a Cut."""


class NoCommandJournal:
    """A journal for jobs without a log."""

    def write(self, command: Command[object], now: float) -> None: ...
    def rotate(self, coordinator: CoordinatorMachine) -> None: ...


class Recorder:
    """Carries out commands on a coordinator; the caller holds the lock."""

    def __init__(
        self, coordinator: CoordinatorMachine, journal: CommandJournal | None = None
    ) -> None:
        self.coordinator = coordinator
        self.journal: CommandJournal = journal or NoCommandJournal()
        self._last_tick: float | None = None

    def do(self, command: Command[Reply], now: float) -> Reply:
        """Carry out a command, write it, and return the coordinator's reply.

        A command that raises is written too, with three exceptions: requests that their check
        refuses, repeated requests that change nothing (a worker that waits for data repeats its
        request several times a second), and MemoryError. That depends on more than the command,
        so the caller has to end this process.
        """
        command.check(self.coordinator)
        before, is_idle = command.repetition_state(self.coordinator), False
        try:
            reply = command.perform(self.coordinator, now)
            is_idle = (
                reply is None
                and before is not None
                and command.repetition_state(self.coordinator) == before
            )
            return reply
        except MemoryError:
            is_idle = True
            raise
        finally:
            if not is_idle:
                self.journal.write(command, now)
            self._cut_if_due(now)

    def end_reshard(self, now: float) -> None:
        """End a reshard once all shards have their parts: with a snapshot, or at once without."""
        reshard = self.coordinator.job.reshard
        if reshard is not None and reshard.complete:
            if reshard.writes_snapshot:
                self.cut(now)
            else:
                self.do(FinishReshard(), now)

    def tick(self, now: float, deaths: Mapping[int, str] = NO_DEATHS) -> list[Member]:
        """End leases and start snapshots that are due. Return the lost and missing workers.

        Args:
            now: The time.
            deaths: Workers whose processes have ended, with the proof; their leases end now.
        """
        for worker, proof in deaths.items():
            self.coordinator.membership.leases.mark_dead(worker, proof)
        gap, self._last_tick = now - (self._last_tick or now), now
        membership = self.coordinator.membership
        if gap > min(max(membership.leases.seconds / 5, MIN_PAUSE_SECONDS), MAX_PAUSE_SECONDS):
            membership.leases.extend(gap)
        late = choose_for_ended_leases(self.coordinator, now)
        for _, command in late:
            self.do(command, now)
        if (
            membership.departed_count > 2 * MAX_DEPARTED_COUNT
            or len(self.coordinator.job.evicted) > MAX_EVICTED_COUNT
        ):
            self.do(ForgetDeparted(MAX_DEPARTED_COUNT), now)
        self._cut_if_due(now)
        if self.coordinator.cuts.age(now) >= RESHARD_SNAPSHOT_RETRY_SECONDS:
            self.end_reshard(now)
        return [member for member, command in late if not isinstance(command, EndAbsence)]

    def scale(self, scaling: WorkerScaling, now: float) -> Decision | None:
        """Let the policy see the job, carry out its decision, and return it.

        A straggler is asked to leave in the same moment, so that no launcher sees one without the
        other and lets a second worker go.
        """
        job = self.coordinator.job
        if not job.started or job.failure is not None or job.reshard is not None:
            return None
        paces = {
            member.worker: member.step_timer.median_seconds
            for member in job.membership.registered()
            if not member.draining
        }
        wanted = job.workers_wanted or len(paces)
        decision = scaling.observe(
            Observation(wanted, paces, job.samples, job.counts["applied"]), now
        )
        if decision is not None:
            if decision.straggler is not None:
                self.do(DrainWorker(decision.straggler), now)
            self.do(WantWorkers(decision.wanted, decision.reason), now)
        return decision

    def cut(self, now: float) -> None:
        """Start a snapshot of the current version, unless one is being written."""
        before = self.coordinator.cuts.cutting
        self.do(StartCut(), now)
        if self.coordinator.cuts.cutting is not before:
            self._begin_segment(now)

    def mend(self, now: float) -> None:
        """Start a snapshot because a log is broken: all logs begin a segment at a Cut."""
        coordinator = self.coordinator
        if (
            coordinator.job.begun
            and not (coordinator.cuts.busy or coordinator.job.reshard)
            and coordinator.cuts.age(now) >= LOG_REPAIR_INTERVAL_SECONDS
        ):
            self.cut(now)

    def _begin_segment(self, now: float) -> None:
        self.journal.rotate(self.coordinator)
        self.do(Advance(), now)  # updates that waited for the Cut

    def _cut_if_due(self, now: float) -> None:
        job = self.coordinator.job
        is_possible = job.begun and job.reshard is None and job.has_newest_weights
        if is_possible and (job.reduction.is_cut_wanted or job.cuts.due(job.version, now)):
            self.cut(now)

    def recovered(
        self, now: float, generation: int, is_complete: bool = True, resumes: bool = False
    ) -> None:
        """Continue after a replay. A snapshot in progress is abandoned.

        Args:
            now: The time.
            generation: Number of this start of the servers.
            is_complete: No process knows more than the journal. Otherwise all workers are removed
                and join as new: one may have batches, or a reply to a push, that it lacks.
            resumes: Another run may begin.
        """
        for member in self.coordinator.membership.current() if not is_complete else ():
            self.do(Leave(member.worker, NOT_WHOLE), now)
        self.do(ContinueJob(generation, resumes), now)


def choose_for_ended_leases(
    coordinator: CoordinatorMachine, now: float
) -> list[tuple[Member, Command[None]]]:
    """Return the members whose leases have ended or run again, and what to do about each.

    A worker whose lease has ended is removed, or its place is kept (`--on-worker-loss`).
    """
    membership, on_loss = coordinator.membership, coordinator.job.rules.on_loss
    if coordinator.job.failure is not None:
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


def replay(
    coordinator: CoordinatorMachine,
    commands: Iterable[RecordedCommand],
    failed: Callable[[RecordedCommand, Exception], None] | None = None,
) -> int:
    """Carry out recorded commands. Return their number.

    Args:
        coordinator: The coordinator at the start of the journal.
        commands: The commands.
        failed: Called for each command that raises an unexpected error, as it did when recorded.
    """
    count = 0
    for recorded in commands:
        count += 1
        try:
            recorded.command.perform(coordinator, recorded.now)
        except PSError:
            continue  # it failed when it was recorded, too
        except MemoryError:
            raise
        except Exception as error:
            if failed is not None:
                failed(recorded, error)
    return count
