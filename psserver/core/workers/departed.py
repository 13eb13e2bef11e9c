"""Departed workers: totals of the forgotten ones, and whether a run is done."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from psserver.core.workers.members import Member, WorkerState


class DepartedWorkers:
    """Which workers of the current run of scripts are done, and totals of forgotten members.

    Attributes:
        states: Number of forgotten members by state.
        done: Number of forgotten members that were done.

    Args:
        members: Current and departed members by number; their owner keeps it up to date.
        current: The current members, likewise.
    """

    def __init__(self, members: Mapping[int, Member], current: Sequence[Member]) -> None:
        self.states = Counter[str]()
        self.done = 0
        self._lost_ranks: set[int] = set()  # whose newest worker had not left in order
        self._unranked = False  # a worker without a rank had not left in order
        self._members = members
        self._current = current
        self._done_in_earlier_run: frozenset[int] = frozenset()
        self._dropped_in_earlier_run = 0

    @property
    def done_count(self) -> int:
        """Number of workers that took part in this run and left without giving a reason."""
        return (
            len(self._done() - self._done_in_earlier_run) + self.done - self._dropped_in_earlier_run
        )

    def _done(self) -> set[int]:
        return {m.worker for m in self._members.values() if m.is_done}

    def is_run_done(self, min_workers: int) -> bool:
        """Return whether at least this number of workers is done and no member is left."""
        return not self._current and self.done_count >= min_workers

    def begin_next_run(self, min_workers: int) -> None:
        """Start another run if the last one is done; its workers then do not count as done."""
        if self.is_run_done(min_workers):
            self._done_in_earlier_run = frozenset(self._done())
            self._dropped_in_earlier_run = self.done

    def forget(self, member: Member, is_newest: bool) -> None:
        """Add a member to the totals. is_newest: no later member has its rank."""
        self.states[member.state] += 1
        self.done += member.is_done
        self._dropped_in_earlier_run += (
            member.is_done and member.worker in self._done_in_earlier_run
        )
        if not is_newest:
            return
        if not member.ranked:
            self._unranked = self._unranked or member.state is not WorkerState.LEFT
        elif member.state is WorkerState.LEFT:
            self._lost_ranks.discard(member.rank)
        else:
            self._lost_ranks.add(member.rank)

    def has_lost(self, ranks: Collection[int]) -> bool:
        """Return whether the newest worker of a rank other than these did not leave in order."""
        return self._unranked or not self._lost_ranks.issubset(ranks)

    def state(self) -> dict[str, Any]:
        """Return the totals as JSON values for `recover`; empty without any."""
        if not self.states:
            return {}
        totals = {
            "states": dict(self.states),
            "done": self.done,
            "lost_ranks": sorted(self._lost_ranks),
            "unranked": self._unranked,
        }
        return {"forgotten": totals}

    def recover(self, state: Mapping[str, Any]) -> None:
        """Load the totals of a `state` of the membership."""
        if totals := state.get("forgotten"):
            self.states, self.done = Counter(totals["states"]), totals["done"]
            self._lost_ranks, self._unranked = set(totals["lost_ranks"]), totals["unranked"]
