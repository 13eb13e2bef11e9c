"""The workers of a job: numbers, leases, states and clocks.

A worker joins, registers, and leaves or is lost; members.py has the states. Time is an argument:
seconds by the monotonic clock of this host.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from pscommon.core.limits import WORKERS_PER_GENERATION
from psserver.core.workers.departed import DepartedWorkers
from psserver.core.workers.leases import WorkerLeases
from psserver.core.workers.member_index import MemberIndex
from psserver.core.workers.members import Member, WorkerState, member_from_json, member_to_json


class Membership:
    """All workers that joined and were not forgotten, in worker order: by rank, then by number.

    Attributes:
        members: Current and departed members by number.
        leases: Leases of the current members.
        departed: Which workers of the current run are done, and totals of forgotten ones.
        index: Changes state, clock and awaited loop of members; nothing else does.

    Args:
        lease_seconds: Duration of a lease.
        generation: Number of this start of the servers.
    """

    def __init__(self, lease_seconds: float, generation: int = 0) -> None:
        self._next_worker = generation * WORKERS_PER_GENERATION + 1
        self.members: dict[int, Member] = {}
        self._current: list[Member] = []  # in worker order
        self._departed_counts: Counter[str] = Counter()
        self.index = MemberIndex()
        self.leases = WorkerLeases(lease_seconds, self._current)
        self.departed = DepartedWorkers(self.members, self._current)

    def begin_generation(self, generation: int) -> None:
        """Give later members numbers of this start of the servers."""
        self._next_worker = max(self._next_worker, generation * WORKERS_PER_GENERATION + 1)

    @property
    def generation(self) -> int:
        """The newest start of the servers in whose range a number was given."""
        return (self._next_worker - 1) // WORKERS_PER_GENERATION

    def join(
        self, now: float, rank: int | None, host: str, pid: int, device: str, attempt: int = 0
    ) -> Member:
        """Add a worker. Without a rank it gets one by its number."""
        worker, ranked = self._next_worker, rank is not None
        self._next_worker += 1
        if rank is None:
            rank = worker % WORKERS_PER_GENERATION - 1
        member = Member(worker, rank, host, pid, device, now, ranked=ranked)
        member.attempt, member.joined_at = attempt, now
        self.members[worker] = member
        self._current.append(member)
        self._sort()
        return member

    def _sort(self) -> None:
        self._current.sort(key=lambda m: (m.rank, m.worker))
        self.index.registered = None

    def restore(self, pushes: dict[int, int]) -> None:
        """Add the workers of a snapshot as past members; they may join again as new.

        pushes: Number of the newest decided push by worker.
        """
        for worker, seq in pushes.items():
            past = Member(worker, worker, "", 0, "", 0.0, WorkerState.PAST, seq=seq)
            past.reason = "the job was restarted"
            self.members[worker] = past
            # one start may have given out more than WORKERS_PER_GENERATION numbers
            self._next_worker = max(self._next_worker, worker + 1)
        self._departed_counts[WorkerState.PAST] += len(pushes)

    def state(self) -> dict[str, Any]:
        """Return all members as JSON values for `recover`."""
        state = {
            "next": self._next_worker,
            "members": [member_to_json(member) for member in self.members.values()],
            "here": [m.worker for m in self._current],
        }
        return state | self.departed.state()

    def recover(self, state: Mapping[str, Any], now: float) -> None:
        """Load a `state`. All leases begin now."""
        self._next_worker = state["next"]
        for values in state["members"]:
            member = member_from_json(values, now)
            self.members[member.worker] = member
        self._current[:] = [self.members[worker] for worker in state["here"]]
        self.index.registered = None
        for member in self._current:
            self.index.add(member)
        self.departed.recover(state)
        self._departed_counts = Counter[str](
            member.state for member in self.members.values() if not member.is_current
        )
        self._departed_counts.update(self.departed.states)

    def __iter__(self) -> Iterator[Member]:
        """Return current and departed members, in worker order."""
        return iter(sorted(self.members.values(), key=lambda m: (m.rank, m.worker)))

    def current(self) -> list[Member]:
        """Return the current members, in worker order."""
        return list(self._current)

    def current_workers(self) -> list[int]:
        """Return the numbers of the current members, in worker order."""
        return [member.worker for member in self._current]

    def active(self) -> list[Member]:
        """Return the members that a round waits for, in worker order."""
        return [m for m in self._current if m.state is WorkerState.ACTIVE]

    def registered(self) -> list[Member]:
        """Return the active and idle members, in worker order."""
        if self.index.registered is None:
            self.index.registered = [m for m in self._current if m.is_registered]
        return self.index.registered

    def count_and_is_first(self, worker: int, awaited: int) -> tuple[int, bool]:
        """Return the number of registered workers, and whether this one is the first of them.

        Before training has started, all current workers count, and the first one is that of rank 0.

        awaited: Number of workers that training waits for; 0: it has started.
        """
        registered = self.registered()
        if not awaited and registered:
            return len(registered), registered[0].worker == worker
        member = self.members.get(worker)
        return max(len(self._current), awaited), member is not None and member.rank == 0

    def activate(self, member: Member) -> None:
        """Let rounds wait for a member, with at least the smallest active clock.

        Others do not wait for steps that were made before it came.
        """
        if member.state is WorkerState.ACTIVE:
            return
        smallest = self.index.active_clocks.value
        least = self._highest_idle_clock() if smallest is None else smallest
        self.index.set_clock(member, max(member.clock, least))
        self.index.set_state(member, WorkerState.ACTIVE)

    def _highest_idle_clock(self) -> int:
        return max((m.clock for m in self._current if m.state is WorkerState.IDLE), default=0)

    def replace(self, old: Member, new: Member) -> None:
        """Give a new member the rank, clock and steps of the one that it replaces."""
        new.rank, new.steps = old.rank, old.steps
        self.index.set_clock(new, old.clock)
        self.index.set_state(new, WorkerState.ACTIVE)
        self._sort()

    # ---- departed members ------------------------------------------------------------------------

    def remove(self, member: Member, state: WorkerState, reason: str) -> None:
        """Let a current member depart as LOST or LEFT."""
        self.index.remove(member, state)
        member.reason, member.missing_since = reason, None
        self._current.remove(member)
        self._departed_counts[state] += 1

    def counts(self) -> Mapping[str, int]:
        """Return the number of members by state, forgotten ones included."""
        return self._departed_counts + Counter[str](member.state for member in self._current)

    @property
    def have_all_left(self) -> bool:
        """Whether the newest worker of every rank has left, so that none will join again.

        A fenced worker joins again as new. Workers without a rank may have the rank of others.
        """
        if self._current:
            return False
        last = {member.rank: member.state for member in self.members.values()}
        return (
            bool(last)
            and set(last.values()) == {WorkerState.LEFT}
            and not self.departed.has_lost(last.keys())
        )

    @property
    def departed_count(self) -> int:
        """Number of departed members that are not forgotten."""
        return len(self.members) - len(self._current)

    def forget_departed(self, keep: int) -> None:
        """Forget all but the newest `keep` departed members, and keep totals of them.

        This bounds the state of long jobs with many joins. A forgotten worker is treated like an
        unknown one: both are fenced.
        """
        newest = {member.rank: member.worker for member in self.members.values()}
        departed = [member for member in self.members.values() if not member.is_current]
        for member in departed[: max(0, len(departed) - keep)]:
            self.departed.forget(member, newest[member.rank] == member.worker)
            del self.members[member.worker]
