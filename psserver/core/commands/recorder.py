"""The command journal: every request that changes the coordinator is recorded for replay.

Theory of operation. The coordinator depends only on its commands and their order (event
sourcing; state machine replication). The recorder carries out each command and writes it to the
journal before any reply leaves. After a crash, `replay` carries out the same commands on the
state of the newest snapshot; a standby carries them out as they arrive.

States: recording, replaying. Events: a request, a shard's report, a tick, the end of a replay.

Invariants:

- Everything that changes a decision is a command, with its time. Heartbeats, status and the check
  for ended leases only read; an ended lease leads to the command "lose". Values that a heartbeat
  reports are a command of their own, at most one a second and worker.
- A repeated request for data that changes nothing and has no answer is not written.
- A Cut is the last command of a segment of the journal. The next segment begins with the state at
  the Cut.
- Requests that no correct process sends are refused before they become commands
  (request_checks.py). A command that raises an unexpected error is written all the same: the error
  depends only on the command and the state, so a replay meets it at the same place.
- The names of commands are on disk; `_PERFORM` maps them to methods.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from pscommon.core.data_loop import LoopSpec
from pscommon.core.data_stream import StreamSpec, spec_from_dict
from pscommon.core.errors import PSError
from pscommon.core.log_entries import BatchKey, Measured, ShardReport
from pscommon.core.model_spec import model_from_json, model_to_json
from psserver.core.commands.request_checks import check_request, unfit_pushes
from psserver.core.job.coordinator import CoordinatorMachine
from psserver.core.job.pending_pushes import staged_from_json, staged_to_json
from psserver.core.job.policy import policy
from psserver.core.job.settings import JobRules
from psserver.core.job.snapshot_schedule import PartReport
from psserver.core.workers.members import Member

MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.3, 1.0
"""A longer time between two ticks means that this process was stopped: a fifth of a lease, within
these bounds.
"""

NO_DEATHS: Mapping[int, str] = MappingProxyType({})

RESHARD_SNAPSHOT_RETRY_SECONDS = 1.0
"""Time until the snapshot that ends a reshard is tried again."""

LOG_REPAIR_INTERVAL_SECONDS = 10.0
"""Least time between two snapshots that are to replace a broken log."""

HUNG = "--progress-timeout: its script made no call"
"""Start of the reason for which a hanging worker is lost."""

DEPARTED_KEPT, EVICTED_MOST = 100, 500
"""Departed workers that are kept, and evicted numbers; both may be exceeded for a moment."""

NOT_WHOLE = "another server took over, and may lack the newest of what the workers were told"
"""Why all workers have to join as new."""


class RecordedCommand(NamedTuple):
    """One request: its name on disk, the time, and its other arguments by name."""

    name: str
    now: float
    args: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        """Return the command as JSON values for `from_json`."""
        return {
            "do": self.name,
            "now": self.now,
            **{key: _to_json(value) for key, value in self.args.items()},
        }

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> "RecordedCommand":
        args = {key: value for key, value in raw.items() if key not in ("do", "now")}
        return RecordedCommand(raw["do"], raw["now"], _FROM_JSON.get(raw["do"], dict)(args))


class CommandJournal(Protocol):
    """The log that commands are written to."""

    def write(self, command: RecordedCommand) -> None:
        """Write a command; its reply leaves after this."""

    def rotate(self, coordinator: CoordinatorMachine) -> None:
        """Begin a segment with the state at a Cut."""


class NoCommandJournal:
    """A journal for jobs without a log."""

    def write(self, command: RecordedCommand) -> None: ...
    def rotate(self, coordinator: CoordinatorMachine) -> None: ...


class Recorder:
    """Carries out commands on a coordinator; the caller holds the lock."""

    def __init__(
        self, coordinator: CoordinatorMachine, journal: CommandJournal | None = None
    ) -> None:
        self.coordinator = coordinator
        self.journal: CommandJournal = journal or NoCommandJournal()
        self._last_tick: float | None = None

    def do(self, name: str, now: float, **args: Any) -> Any:
        """Carry out a command, write it, and return the coordinator's answer.

        A command that raises is written too, with three exceptions: requests that check_request
        refuses, repeated requests for data that change nothing (a waiting worker repeats them
        several times a second), and MemoryError. That depends on more than the command, so the
        caller has to end this process.
        """
        check_request(self.coordinator, name, args)
        command, idle = RecordedCommand(name, now, args), False
        asks = (
            partial(self.coordinator.waits, args["worker"], args["spec"])
            if name == "next_batches"
            else None
        )
        before = asks() if asks else None
        try:
            answer = perform(self.coordinator, command)
            idle = answer is None and asks is not None and before is not None and asks() == before
            return answer
        except MemoryError:
            idle = True
            raise
        finally:
            if not idle:
                self.journal.write(command)
            self._cut_if_due(now)

    def report(self, report: ShardReport, now: float) -> None:
        """Process a shard's report. One without news is not written: it decides nothing."""
        if (
            report.epoch == self.coordinator.epoch
            and report.shard not in self.coordinator.followers
        ):
            self.do("follows", now, shard=report.shard)
        if self.coordinator.has_moved(report):
            self.do("moved", now, shard=report.shard)
            self._end_move(now)
        news = self.coordinator.news(report) if report.staged else []
        unfit = unfit_pushes(self.coordinator, news) if news else {}
        if unfit:
            report = replace(
                report, staged=tuple(each for each in report.staged if each.key not in unfit)
            )
        # else it is reported again
        for key, why in unfit.items() if self.coordinator.move is None else ():
            self.do(
                "refuse_push",
                now,
                worker=key.worker,
                seq=key.seq,
                reason=why.reason,
                detail=why.detail,
            )
        has_measured = report.measured is not None and self.coordinator.has_measured(report)
        if len(news) > len(unfit) or has_measured:
            self.do("report", now, report=report)
        else:
            self.coordinator.reached(report)

    def _end_move(self, now: float) -> None:
        """End a reshard once all shards have their parts: with a snapshot, or at once without."""
        move = self.coordinator.move
        if move is not None and move.complete:
            if move.keeps:
                self.cut(now)
            else:
                self.do("settle", now)

    def tick(self, now: float, deaths: Mapping[int, str] = NO_DEATHS) -> list[Member]:
        """End leases and start snapshots that are due. Return the lost and missing workers.

        Args:
            now: The time.
            deaths: Workers whose processes have ended, with the proof; their leases end now.
        """
        for worker, proof in deaths.items():
            self.coordinator.membership.mark_dead(worker, proof)
        gap, self._last_tick = now - (self._last_tick or now), now
        membership = self.coordinator.membership
        if gap > min(max(membership.lease / 5, MIN_PAUSE_SECONDS), MAX_PAUSE_SECONDS):
            membership.extend_leases(gap)
        late = self._late(now)
        for member, name, reason in late:
            self.do(
                name, now, worker=member.worker, **({"reason": reason} if name == "lose" else {})
            )
        if (
            membership.departed_count > 2 * DEPARTED_KEPT
            or len(self.coordinator.evicted) > EVICTED_MOST
        ):
            self.do("forget_departed", now, keep=DEPARTED_KEPT)
        self._cut_if_due(now)
        if self.coordinator.cuts.age(now) >= RESHARD_SNAPSHOT_RETRY_SECONDS:
            self._end_move(now)
        return [member for member, name, _ in late if name != "back"]

    def _late(self, now: float) -> list[tuple[Member, str, str]]:
        membership, on_loss = self.coordinator.membership, self.coordinator.rules.on_loss
        if self.coordinator.failure is not None:
            return []  # members are to learn of the failure, not that they are fenced
        expired = membership.with_ended_lease(now)
        late = [
            (m, "back", "")
            for m in membership.current()
            if m.missing_since is not None and m not in expired
        ]
        for member in expired:
            reason = (
                member.death
                or f"nothing heard from it for {now - member.last_contact_at:.1f} s; "
                "its lease ended"
            )
            if on_loss.mode != "wait" or not member.is_registered:
                late.append((member, "lose", reason))
            elif member.missing_since is None:
                late.append((member, "missing", reason))
            elif now - member.missing_since >= on_loss.seconds:
                late.append(
                    (
                        member,
                        "lose",
                        f"{reason}, and no worker took its place within {on_loss.seconds:g} s",
                    )
                )
        stuck = [member for member in membership.over_progress_timeout() if member not in expired]
        return late + [
            (member, "lose", f"{HUNG} for {member.no_call_seconds:.1f} s") for member in stuck
        ]

    def cut(self, now: float) -> None:
        """Start a snapshot of the current version, unless one is being written."""
        before = self.coordinator.cuts.cutting
        self.do("cut", now)
        if self.coordinator.cuts.cutting is not before:
            self._turn_page(now)

    def mend(self, now: float) -> None:
        """Start a snapshot because a log is broken: all logs begin a segment at a Cut."""
        coordinator = self.coordinator
        if (
            coordinator.begun
            and not (coordinator.cuts.busy or coordinator.move)
            and coordinator.cuts.age(now) >= LOG_REPAIR_INTERVAL_SECONDS
        ):
            self.cut(now)

    def _turn_page(self, now: float) -> None:
        self.journal.rotate(self.coordinator)
        self.do("advance", now)  # updates that waited for the Cut

    def _cut_if_due(self, now: float) -> None:
        coordinator = self.coordinator
        if (
            coordinator.begun
            and coordinator.move is None
            and coordinator.cuts.due(coordinator.version, now)
        ):
            self.cut(now)

    def recovered(
        self, now: float, generation: int, whole: bool = True, resumes: bool = False
    ) -> None:
        """Continue after a replay. A snapshot in progress is abandoned.

        Args:
            now: The time.
            generation: Number of this start of the servers.
            whole: No process knows more than the journal. Otherwise all workers are removed and
                join as new: one may have batches, or a reply to a push, that the journal lacks.
            resumes: Another run may begin.
        """
        for member in self.coordinator.membership.current() if not whole else ():
            self.do("leave", now, worker=member.worker, reason=NOT_WHOLE)
        self.do("recovered", now, generation=generation, **({"resumes": True} if resumes else {}))


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

    Raises:
        ValueError: This release does not know a command.
    """
    count = 0
    for command in commands:
        if command.name not in _PERFORM:
            raise ValueError(f"this release does not know the command {command.name!r}")
        count += 1
        try:
            perform(coordinator, command)
        except PSError:
            continue  # it failed when it was recorded, too
        except MemoryError:
            raise
        except Exception as error:
            if failed is not None:
                failed(command, error)
    return count


def perform(coordinator: CoordinatorMachine, command: RecordedCommand) -> Any:
    """Carry out one command."""
    return _PERFORM[command.name](coordinator, command.now, command.args)


Action = Callable[[CoordinatorMachine, float, Mapping[str, Any]], Any]


# by the names in logs on disk
_PERFORM: Mapping[str, Action] = {
    "join": lambda c, now, args: c.join(**args, now=now),
    "register": lambda c, now, args: c.register(**args, now=now),
    "leave": lambda c, now, args: c.leave(**args, now=now),
    "drain": lambda c, now, args: c.drain(**args, now=now),
    "missing": lambda c, now, args: c.missing(**args, now=now),
    "back": lambda c, now, args: c.back(**args, now=now),
    "lose": lambda c, now, args: c.lose(**args, now=now),
    "next_batches": lambda c, now, args: c.next_batches(**args, now=now),
    "return_batches": lambda c, now, args: c.return_batches(**args, now=now),
    "report_metrics": lambda c, now, args: c.report_metrics(**args, now=now),
    "report": lambda c, now, args: c.report(**args, now=now),
    "follows": lambda c, now, args: c.follows(**args, now=now),
    "advance": lambda c, now, args: c.advance(**args, now=now),
    "cut": lambda c, now, args: c.cut(**args, now=now),
    "recovered": lambda c, now, args: c.recovered(**args, now=now),
    "reshard": lambda c, now, args: c.reshard(**args, now=now),
    "moved": lambda c, now, args: c.moved(**args, now=now),
    "settle": lambda c, now, args: c.settle(**args, now=now),
    "reborn": lambda c, now, args: c.reborn(**args, now=now),
    "refuse_push": lambda c, now, args: c.refuse_push(**args, now=now),
    "forget_departed": lambda c, now, args: c.forget_departed(**args, now=now),
    "go_by": lambda c, now, args: c.go_by(JobRules.from_json(args["rules"]), now),
    "set_policy": lambda c, now, args: c.set_policy(policy(*args["row"]), now),
    "part": lambda c, now, args: c.cuts.part(args["shard"], args["part"]),
    "shard_lost": lambda c, now, args: c.shard_lost(args["shard"]),
    "report_values": lambda c, now, args: c.reported.take(
        c.member(args["worker"], now), args["values"], c.membership
    ),
    "filed": lambda c, now, args: c.cuts.filed(),
}


def _to_json(value: Any) -> Any:
    match value:
        case LoopSpec() | StreamSpec():
            return value.as_dict()
        case ShardReport():
            measured = [list(value.measured)] if value.measured is not None else []
            return [value.shard, value.epoch, value.index, staged_to_json(value.staged), *measured]
        case _ if hasattr(value, "tensors"):
            return model_to_json(value)
    return value


def _report_from_json(values: list[Any]) -> ShardReport:
    shard, epoch, index, staged, *measured = values
    return ShardReport(
        shard,
        epoch,
        index,
        tuple(staged_from_json(staged)),
        measured=Measured(*measured[0]) if measured else None,
    )


_FROM_JSON: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "register": lambda args: {**args, "spec": model_from_json(args["spec"])},
    "next_batches": lambda args: {**args, "spec": spec_from_dict(args["spec"])},
    "return_batches": lambda args: {**args, "batches": [BatchKey(*key) for key in args["batches"]]},
    "report": lambda args: {"report": _report_from_json(args["report"])},
    "part": lambda args: {**args, "part": PartReport(*args["part"])},
}
