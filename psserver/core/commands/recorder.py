"""What was asked of a coordinator, written down, so that one that died can be made again.

Theory of operation. A Coordinator depends on nothing but the requests that it gets and their
order. So the recorder carries each request out, has it written before anybody learns what came
of it, and after a crash carries the same requests out again on the state that the last snapshot
holds. Reading its mind is all that may go by it: heartbeats (the values that one brings are a
request of their own, at most one a second and worker), status, and the question whose lease has
ended - the answer to that is a request again ("lose"), with its time. So may a request for data
that is asked again and still has no answer, if it has changed nothing.

A snapshot's Cut is the last thing in a stretch of requests; the next stretch begins with the
state at the cut.

Requests that no correct process sends are refused before they become commands
(core/request_checks.py). A command that raises an unexpected error all the same is recorded with
what it has changed so far. The error depends on nothing but the command and the state, so a
replay and a standby meet it at the same place, and go on from the same state.
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

SHORTEST_PAUSE, LONGEST_PAUSE = 0.3, 1.0
"""Seconds between ticks from which on this process counts as having been stopped itself: a fifth
of a lease, if that is no less and no more than these."""

NO_DEATHS: Mapping[int, str] = MappingProxyType({})

AGAIN = 1.0
"""Seconds until the snapshot that ends a move is tried again."""

MEND = 10.0
"""Seconds after a snapshot was begun until one is tried because a log is broken."""

HUNG = "--progress-timeout: its script made no call"
"""How the reason begins why such a worker is lost."""

DEPARTED_KEPT, EVICTED_MOST = 100, 500
"""Departed workers that stay known, and numbers of evicted ones; both may be more for a moment."""

NOT_WHOLE = "another server took over, and may lack the newest of what the workers were told"
"""Why all workers have to come as new."""


class RecordedCommand(NamedTuple):
    """One request: a method of Coordinator or Cuts, the time, and its other arguments by name."""

    name: str
    now: float
    args: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        """JSON-ready; `from_json` is the way back."""
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
    """Where commands are written."""

    def write(self, command: RecordedCommand) -> None:
        """Keep it, before anybody learns what came of it."""

    def rotate(self, coordinator: CoordinatorMachine) -> None:
        """There is a cut: what is written from now on goes on from here."""


class NoCommandJournal:
    """Nothing is kept."""

    def write(self, command: RecordedCommand) -> None: ...
    def rotate(self, coordinator: CoordinatorMachine) -> None: ...


class Recorder:
    """Carries out commands on a coordinator, in the shell's lock."""

    def __init__(
        self, coordinator: CoordinatorMachine, journal: CommandJournal | None = None
    ) -> None:
        self.coordinator = coordinator
        self.journal: CommandJournal = journal or NoCommandJournal()
        self._last_tick: float | None = None

    def do(self, name: str, now: float, **args: Any) -> Any:
        """The answer of the coordinator; whatever is raised, the command is written.

        But not where a worker that waits for data has asked once more, for nothing: it asks
        several times a second. And not where check_request refuses it, which changes nothing.
        MemoryError depends on more than the command, so it is not written either: the caller has
        to end this process.
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
        """A shard's word. One that holds no news is not worth a line: it moves nothing but what
        is forgotten.
        """
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
        for key, why in (
            unfit.items() if self.coordinator.move is None else ()
        ):  # else it is reported again
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
        """Once all shards hold their new parts: with the snapshot that is written now, or at
        once without any.
        """
        move = self.coordinator.move
        if move is not None and move.complete:
            if move.keeps:
                self.cut(now)
            else:
                self.do("settle", now)

    def tick(self, now: float, deaths: Mapping[int, str] = NO_DEATHS) -> list[Member]:
        """Time passes: ends leases, starts snapshots that are due. Returns the workers that are
        silent for too long.

        deaths: workers whose processes have ended, with the proof; their leases end now.
        """
        for worker, proof in deaths.items():
            self.coordinator.membership.mark_dead(worker, proof)
        gap, self._last_tick = now - (self._last_tick or now), now
        membership = self.coordinator.membership
        if gap > min(max(membership.lease / 5, SHORTEST_PAUSE), LONGEST_PAUSE):
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
        if self.coordinator.cuts.age(now) >= AGAIN:
            self._end_move(now)
        return [member for member, name, _ in late if name != "back"]

    def _late(self, now: float) -> list[tuple[Member, str, str]]:
        membership, on_loss = self.coordinator.membership, self.coordinator.rules.on_loss
        if self.coordinator.failure is not None:
            return []  # those who are here are to hear of that, not that they are out
        expired = membership.with_ended_lease(now)
        late = [
            (m, "back", "")
            for m in membership.current()
            if m.missing_since is not None and m not in expired
        ]
        for member in expired:
            reason = (
                member.death
                or f"nothing heard from it for {now - member.last_contact_at:.1f} s; its lease ended"
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
                        f"{reason}, and nobody took its place within {on_loss.seconds:g} s",
                    )
                )
        stuck = [member for member in membership.over_progress_timeout() if member not in expired]
        return late + [
            (member, "lose", f"{HUNG} for {member.no_call_seconds:.1f} s") for member in stuck
        ]

    def cut(self, now: float) -> None:
        """Snapshot the version that stands, unless one is being written."""
        before = self.coordinator.cuts.cutting
        self.do("cut", now)
        if self.coordinator.cuts.cutting is not before:
            self._turn_page(now)

    def mend(self, now: float) -> None:
        """Something could not be written down: a cut is where all logs begin anew, if the disk
        lets them.
        """
        coordinator = self.coordinator
        if (
            coordinator.begun
            and not (coordinator.cuts.busy or coordinator.move)
            and coordinator.cuts.age(now) >= MEND
        ):
            self.cut(now)

    def _turn_page(self, now: float) -> None:
        self.journal.rotate(self.coordinator)
        self.do("advance", now)  # what had to wait for the cut

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
        """All that was written has been done again: time goes on from here, and a snapshot under
        way is given up.

        whole: nobody knows more than was written. Otherwise no worker can go on where it stands:
        it may have been dealt batches, or be told by one shard that a push has counted which the
        others still wait for. All come as new. resumes: another run may begin.
        """
        for member in self.coordinator.membership.current() if not whole else ():
            self.do("leave", now, worker=member.worker, reason=NOT_WHOLE)
        self.do("recovered", now, generation=generation, **({"resumes": True} if resumes else {}))


def replay(
    coordinator: CoordinatorMachine,
    commands: Iterable[RecordedCommand],
    failed: Callable[[RecordedCommand, Exception], None] | None = None,
) -> int:
    """Do everything again; returns how many commands there were.

    failed: told of each command that raised an unexpected error, as it did when it was recorded.
    Raises ValueError for a command that this release does not know.
    """
    count = 0
    for command in commands:
        if command.name not in _PERFORM:
            raise ValueError(f"this release does not know the command {command.name!r}")
        count += 1
        try:
            perform(coordinator, command)
        except PSError:
            continue  # it failed the first time, too
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


# by the names that stand in logs on disk
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
