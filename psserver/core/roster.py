"""Who takes part: workers, their leases and clocks. Time is an argument: this host's monotonic seconds."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    JOINED = "joined"  # has a place, has not registered the model: no round waits for it
    ACTIVE = "active"
    IDLE = "idle"  # waits for data: rounds and the bound go on without it
    LOST = "lost"
    LEFT = "left"


@dataclass(slots=True)
class Member:
    """One worker.

    seq: its newest push that was decided; steps: pushes that counted; clock: steps for the gate; waiting: the loop that
    it has no batch of and waits for.
    """

    worker: int
    rank: int
    host: str
    pid: int
    device: str
    last_seen: float
    state: State = State.JOINED
    clock: int = 0
    steps: int = 0
    seq: int = 0
    waiting: int | None = None
    reason: str = ""
    step_seconds: float = 0.0
    samples_per_second: float = 0.0
    phase: str = ""

    @property
    def alive(self) -> bool:
        return self.state not in (State.LOST, State.LEFT)

    @property
    def registered(self) -> bool:
        return self.state in (State.ACTIVE, State.IDLE)

    def __str__(self) -> str:
        return f"worker {self.worker} (rank {self.rank}, {self.host} pid {self.pid}, step {self.steps})"


GENERATION = 10_000
"""Worker numbers of the n-th start of a job's servers begin after n times this many."""


class Roster:
    """All workers that ever joined, in worker order: by rank, then by order of joining."""

    def __init__(self, lease: float, generation: int = 0) -> None:
        self.lease = lease
        self._next_worker = generation * GENERATION + 1
        self.members: dict[int, Member] = {}
        self._here: list[Member] = []  # in worker order

    def join(self, now: float, rank: int | None, host: str, pid: int, device: str) -> Member:
        worker = self._next_worker
        self._next_worker += 1
        member = Member(worker, worker % GENERATION - 1 if rank is None else rank, host, pid, device, now)
        self.members[worker] = member
        self._here = sorted([*self._here, member], key=lambda m: (m.rank, m.worker))
        return member

    def restore(self, pushes: dict[int, int]) -> None:
        """Workers of before a restart, with their newest decided push: they are out, and may come back as new."""
        for worker, seq in pushes.items():
            gone = Member(worker, worker, "", 0, "", 0.0, State.LOST, seq=seq, reason="the job was restarted")
            self.members[worker] = gone

    def __iter__(self) -> Iterator[Member]:
        """Everybody who was ever here, in worker order."""
        return iter(sorted(self.members.values(), key=lambda m: (m.rank, m.worker)))

    def here(self) -> list[Member]:
        """Those whose lease runs, in worker order."""
        return list(self._here)

    def active(self) -> list[Member]:
        """Those a round waits for, in worker order."""
        return [m for m in self._here if m.state is State.ACTIVE]

    def registered(self) -> list[Member]:
        """Those who train, active or waiting for data, in worker order."""
        return [m for m in self._here if m.registered]

    def clocks(self) -> dict[int, int]:
        """Clock of every active worker, in worker order."""
        return {m.worker: m.clock for m in self._here if m.state is State.ACTIVE}

    def activate(self, member: Member) -> None:
        """(Re)enter the rounds: level with the slowest, so that nobody has to wait for steps made before."""
        if member.state is State.ACTIVE:
            return
        member.clock = max(member.clock, min(self.clocks().values(), default=self._highest_clock()))
        member.state = State.ACTIVE

    def _highest_clock(self) -> int:
        return max((m.clock for m in self._here if m.state is State.IDLE), default=0)

    def expired(self, now: float) -> list[Member]:
        return [m for m in self._here if now - m.last_seen > self.lease]

    def remove(self, member: Member, state: State, reason: str) -> None:
        """The worker is LOST or has LEFT."""
        member.state, member.reason, member.waiting = state, reason, None
        self._here.remove(member)

    @property
    def finished(self) -> int:
        """Workers that took part and have left, done."""
        return sum(m.state is State.LEFT and not m.reason and m.steps > 0 for m in self.members.values())

    def all_done(self, least: int) -> bool:
        """At least so many have finished, and nobody is there any more."""
        return self.finished >= least and not self._here

    def forgive(self, seconds: float) -> None:
        """This process itself was stopped for so long: nobody's lease ran meanwhile."""
        for member in self._here:
            member.last_seen += seconds
