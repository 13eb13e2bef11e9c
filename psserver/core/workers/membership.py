"""Who takes part: workers, their leases and clocks. Time is an argument: this host's monotonic
seconds.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from psserver.core.workers.step_timer import StepTimer


class WorkerState(StrEnum):
    JOINED = "joined"  # has a place, has not registered the model: no round waits for it
    ACTIVE = "active"
    IDLE = "idle"  # waits for data: rounds and the bound go on without it
    LOST = "lost"
    LEFT = "left"
    # of before the servers went back to a snapshot: no fault of its own, and it may come back as
    # new
    PAST = "past"


DEPARTED = (WorkerState.LOST, WorkerState.LEFT, WorkerState.PAST)


@dataclass(slots=True)
class Member:
    """One worker.

    ranked: its launcher gave it its rank; attempt: how often that had started it before. seq:
    its newest push that was decided; steps: pushes that counted; clock: steps for the gate;
    waiting: the loop that it has no batch of and waits for; bad: pushes in a row that were no
    good. missing_since: its lease has ended and its place is kept; draining: it was asked to
    leave; ended: it has heard that a loop has no more data. By the clock of this process:
    joined_at; last_seen, when it last asked the coordinator for something; last_moved, when
    bytes of its push, or of weights for it, last did; death: what proves that its process has
    ended, empty while nothing does. step_seconds: as the worker says, waiting for others
    included; pace: as its pushes show. no_call_seconds: at its last heartbeat, since its script
    called into psworker; 0 while a server has a request of it.
    """

    worker: int
    rank: int
    host: str
    pid: int
    device: str
    last_seen: float
    state: WorkerState = WorkerState.JOINED
    ranked: bool = False
    attempt: int = 0
    clock: int = 0
    steps: int = 0
    seq: int = 0
    bad: int = 0
    waiting: int | None = None
    reason: str = ""
    missing_since: float | None = None
    draining: bool = False
    ended: bool = False
    joined_at: float = 0.0
    last_moved: float = 0.0
    death: str = ""
    step_seconds: float = 0.0
    samples_per_second: float = 0.0
    phase: str = ""
    no_call_seconds: float = 0.0
    pace: StepTimer = field(default_factory=StepTimer)

    @property
    def alive(self) -> bool:
        return self.state not in DEPARTED

    @property
    def registered(self) -> bool:
        return self.state in (WorkerState.ACTIVE, WorkerState.IDLE)

    def take(self, **values: Any) -> None:
        """What a heartbeat says about the worker, by attribute."""
        for name, value in values.items():
            setattr(self, name, value)

    @property
    def is_done(self) -> bool:
        """Has it taken part, be it that there was no data left for it, and left without giving a
        reason?
        """
        return self.state is WorkerState.LEFT and not self.reason and (self.steps > 0 or self.ended)

    @property
    def heard_at(self) -> float:
        """When there was the last sign of life of it. Its bytes are one, for they can keep
        heartbeats from arriving.
        """
        return max(self.last_seen, self.last_moved)

    def __str__(self) -> str:
        return f"worker {self.worker} (rank {self.rank}, {self.host} pid {self.pid}, step {self.steps})"


GENERATION = 10_000
"""Worker numbers of the n-th start of a job's servers begin after n times this many."""

LATENESS = 2.5
"""Seconds that a heartbeat can be under way, or wait in a server that was stopped for a moment."""

# keys on disk, each of which is an attribute; what a worker tells about itself goes with the
# process that heard it
_KEYS = (
    "worker",
    "rank",
    "host",
    "pid",
    "device",
    "state",
    "ranked",
    "attempt",
    "clock",
    "steps",
    "seq",
    "bad",
    "waiting",
    "reason",
    "missing_since",
    "draining",
    "ended",
)

HANGING_SECONDS = 30.0
"""A script that makes no call for so long is named as hanging; a shorter --progress-timeout
counts instead.
"""


@dataclass(slots=True)
class DepartedTotals:
    """What is still known of departed members that are forgotten.

    states: how many there were in each state. done: how many of them had finished. lost_ranks:
    ranks whose newest worker had not left in order; unranked: some worker without a rank had
    not.
    """

    states: Counter[str] = field(default_factory=Counter)
    done: int = 0
    lost_ranks: set[int] = field(default_factory=set)
    unranked: bool = False

    def add(self, member: Member, is_newest: bool) -> None:
        """is_newest: no later member has its rank."""
        self.states[member.state] += 1
        self.done += member.is_done
        if not is_newest:
            return
        if not member.ranked:
            self.unranked = self.unranked or member.state is not WorkerState.LEFT
        elif member.state is WorkerState.LEFT:
            self.lost_ranks.discard(member.rank)
        else:
            self.lost_ranks.add(member.rank)

    def has_lost(self, ranks: Collection[int]) -> bool:
        """Was the newest worker of some rank lost, if none of these ranks replaces it?"""
        return self.unranked or not self.lost_ranks.issubset(ranks)

    def state(self) -> dict[str, Any]:
        """JSON-ready; `recovered` is the way back."""
        ranks = sorted(self.lost_ranks)
        return {
            "states": dict(self.states),
            "done": self.done,
            "lost_ranks": ranks,
            "unranked": self.unranked,
        }

    @staticmethod
    def recovered(state: Mapping[str, Any]) -> "DepartedTotals":
        if not state:
            return DepartedTotals()
        return DepartedTotals(
            Counter(state["states"]), state["done"], set(state["lost_ranks"]), state["unranked"]
        )


class Membership:
    """All workers that joined, but for those that are forgotten, in worker order: by rank, then
    by order of joining.
    """

    def __init__(self, lease: float, generation: int = 0) -> None:
        self.lease = lease
        self.progress_timeout: float | None = None
        self._next_worker = generation * GENERATION + 1
        self.members: dict[int, Member] = {}
        self._here: list[Member] = []  # in worker order
        self._gone: Counter[str] = Counter()
        self._past: frozenset[int] = frozenset()
        self._forgotten = DepartedTotals()
        self._past_forgotten = 0  # done before this process began another run, and forgotten

    def new_generation(self, generation: int) -> None:
        """The servers were started again: whoever joins from now on gets a number of this start."""
        self._next_worker = max(self._next_worker, generation * GENERATION + 1)

    @property
    def generation(self) -> int:
        """The newest one of which numbers have been given out, or will be next."""
        return (self._next_worker - 1) // GENERATION

    def join(
        self, now: float, rank: int | None, host: str, pid: int, device: str, attempt: int = 0
    ) -> Member:
        worker = self._next_worker
        self._next_worker += 1
        place = worker % GENERATION - 1 if rank is None else rank
        member = Member(
            worker,
            place,
            host,
            pid,
            device,
            now,
            ranked=rank is not None,
            attempt=attempt,
            joined_at=now,
        )
        self.members[worker] = member
        self._here.append(member)
        self._sort()
        return member

    def _sort(self) -> None:
        self._here.sort(key=lambda m: (m.rank, m.worker))

    def restore(self, pushes: dict[int, int]) -> None:
        """Workers of before a restart, with their newest decided push: they are out, and may
        come back as new.
        """
        for worker, seq in pushes.items():
            gone = Member(
                worker,
                worker,
                "",
                0,
                "",
                0.0,
                WorkerState.PAST,
                seq=seq,
                reason="the job was restarted",
            )
            self.members[worker] = gone
            self._next_worker = max(
                self._next_worker, worker + 1
            )  # one start may have given out more than GENERATION
        self._gone[WorkerState.PAST] += len(pushes)

    def state(self) -> dict[str, Any]:
        """All members with all that was decided about them, JSON-ready; `recover` is the way
        back.
        """
        members = [{key: getattr(member, key) for key in _KEYS} for member in self.members.values()]
        state = {
            "next": self._next_worker,
            "members": members,
            "here": [m.worker for m in self._here],
        }
        return state | ({"forgotten": self._forgotten.state()} if self._forgotten.states else {})

    def recover(self, state: Mapping[str, Any], now: float) -> None:
        """As it was; all leases run from now."""
        self._next_worker = state["next"]
        for values in state["members"]:
            member = Member(
                **{**values, "state": WorkerState(values["state"])}, last_seen=now, joined_at=now
            )
            self.members[member.worker] = member
        self._here = [self.members[worker] for worker in state["here"]]
        self._forgotten = DepartedTotals.recovered(state.get("forgotten", {}))
        self._gone = Counter[str](
            member.state for member in self.members.values() if not member.alive
        )
        self._gone.update(self._forgotten.states)

    def __iter__(self) -> Iterator[Member]:
        """Everybody who was ever here, in worker order."""
        return iter(sorted(self.members.values(), key=lambda m: (m.rank, m.worker)))

    def here(self) -> list[Member]:
        """Those who have a place, in worker order."""
        return list(self._here)

    def workers(self) -> list[int]:
        """The numbers of those who have a place."""
        return [member.worker for member in self._here]

    def active(self) -> list[Member]:
        """Those a round waits for, in worker order."""
        return [m for m in self._here if m.state is WorkerState.ACTIVE]

    def registered(self) -> list[Member]:
        """Those who train, active or waiting for data, in worker order."""
        return [m for m in self._here if m.registered]

    def standing(self, worker: int, started: bool) -> tuple[int, bool]:
        """Return how many workers are registered, and whether this one is the first; before the
        start: of rank 0.
        """
        registered = self.registered()
        if started and registered:
            return len(registered), registered[0].worker == worker
        member = self.members.get(worker)
        return len(registered), member is not None and member.rank == 0

    def clocks(self) -> dict[int, int]:
        """Clock of every active worker, in worker order."""
        return {m.worker: m.clock for m in self._here if m.state is WorkerState.ACTIVE}

    def activate(self, member: Member) -> None:
        """(Re)enter the rounds: level with the slowest, so that nobody has to wait for steps
        made before.
        """
        if member.state is WorkerState.ACTIVE:
            return
        member.clock = max(member.clock, min(self.clocks().values(), default=self._highest_clock()))
        member.state = WorkerState.ACTIVE

    def _highest_clock(self) -> int:
        return max((m.clock for m in self._here if m.state is WorkerState.IDLE), default=0)

    def predecessor(self, member: Member) -> Member | None:
        """The worker whose place this one, which registers now, was started to take.

        Of its rank, and missing or an earlier attempt of the same launcher; without ranks the
        first that is missing.
        """
        for other in self._alike(member):
            if other.missing_since is not None or (
                member.ranked and member.attempt > other.attempt
            ):
                return other
        return None

    def successor(self, member: Member) -> Member | None:
        """One who trains, and whom the same launcher started in this one's place: what this one
        says comes late.
        """
        return next(
            (
                other
                for other in self._alike(member)
                if member.ranked and other.attempt > member.attempt
            ),
            None,
        )

    def doubtful(self, member: Member, asked: float) -> Member | None:
        """One whose place this one may have been started to take, or the other way round.

        Nothing tells that the older of the two lived after the newer one joined: what comes soon
        after that may have been sent before, and been late. asked: when this one asked.
        """
        for other in self._alike(member):
            heard, joined = other.last_seen, member.joined_at
            if other.worker > member.worker:
                heard, joined = asked, other.joined_at
            if heard <= joined + LATENESS:
                return other
        return None

    def _alike(self, member: Member) -> list[Member]:
        """Those who train and whose place this one could take."""
        return [
            other
            for other in self.registered()
            if other is not member
            and other.ranked == member.ranked
            and (other.rank == member.rank or not member.ranked)
        ]

    def take_over(self, member: Member, old: Member) -> None:
        """Go on in the place of another: its rank, its clock, its steps."""
        member.rank, member.clock, member.steps = old.rank, old.clock, old.steps
        member.state = WorkerState.ACTIVE
        self._sort()

    def expired(self, now: float) -> list[Member]:
        return [m for m in self._here if m.death or now - m.heard_at > self.lease]

    def prove_dead(self, worker: int, proof: str) -> None:
        """End the lease of a worker whose process has ended, for good: what it sent before may
        still arrive.
        """
        member = self.members.get(worker)
        if member is not None and member.alive:
            member.death = member.death or proof

    def is_hanging(self, member: Member) -> bool:
        """Does its script make no call, although nothing keeps it waiting? A long evaluation
        looks the same.
        """
        limit = min(HANGING_SECONDS, self.progress_timeout or HANGING_SECONDS)
        return member.registered and member.no_call_seconds > limit

    def stuck(self) -> list[Member]:
        """Those that have hung for longer than --progress-timeout."""
        limit = self.progress_timeout
        return [
            m
            for m in self._here
            if limit is not None and m.registered and m.no_call_seconds > limit
        ]

    def lease_left(self, now: float) -> float:
        """Seconds until the next lease ends that has not ended yet; infinite where there is
        none.
        """
        left = (m.heard_at + self.lease - now for m in self._here)
        return min((seconds for seconds in left if seconds >= 0), default=math.inf)

    def remove(self, member: Member, state: WorkerState, reason: str) -> None:
        """The worker is LOST or has LEFT."""
        member.state, member.reason, member.waiting, member.missing_since = (
            state,
            reason,
            None,
            None,
        )
        self._here.remove(member)
        self._gone[state] += 1

    def counts(self) -> Mapping[str, int]:
        """How many of those who were ever here are in each state."""
        return self._gone + Counter[str](member.state for member in self._here)

    @property
    def finished(self) -> int:
        """Workers that took part, be it that there was no data left for them, and have left,
        done.
        """
        return len(self._done() - self._past) + self._forgotten.done - self._past_forgotten

    def _done(self) -> set[int]:
        return {m.worker for m in self.members.values() if m.is_done}

    def all_done(self, least: int) -> bool:
        """At least so many have finished, and nobody is there any more."""
        return not self._here and self.finished >= least

    def begin_run(self, least: int) -> None:
        """This process was started for another run where all were done: those do not count as
        finished in it.
        """
        if self.all_done(least):
            self._past, self._past_forgotten = frozenset(self._done()), self._forgotten.done

    @property
    def all_left(self) -> bool:
        """Nobody of before will come: whoever last had a place has left it. One that was fenced
        comes back as new.
        """
        last = {member.rank: member.state for member in self.members.values()}
        return (
            bool(last)
            and set(last.values()) == {WorkerState.LEFT}
            and not self._forgotten.has_lost(last.keys())
        )

    @property
    def departed(self) -> int:
        """How many members have no place any more and are still known."""
        return len(self.members) - len(self._here)

    def forget(self, keep: int) -> None:
        """Forget departed members but for the newest `keep`, so that long jobs with many joins
        stay small.

        To the others a forgotten worker is a stranger: it is out of the job, too. Counts of them
        stay.
        """
        newest = {member.rank: member.worker for member in self.members.values()}
        gone = [member for member in self.members.values() if not member.alive]
        for member in gone[: max(0, len(gone) - keep)]:
            self._forgotten.add(member, newest[member.rank] == member.worker)
            self._past_forgotten += member.is_done and member.worker in self._past
            del self.members[member.worker]

    def forgive(self, seconds: float) -> None:
        """This process itself was stopped for so long: nobody's lease ran meanwhile."""
        for member in self._here:
            member.last_seen += seconds
            member.last_moved += seconds
            member.joined_at += seconds
            member.pace.forgive(seconds)
