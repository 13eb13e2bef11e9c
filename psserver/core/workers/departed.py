"""Departed workers: totals of the forgotten ones, and whether a run is done."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from psserver.core.workers.members import Member, WorkerState


@dataclass(slots=True)
class DepartedTotals:
    """Totals of departed members that were forgotten.

    Attributes:
        states: Number of members by state.
        done: Number of members that were done.
        lost_ranks: Ranks whose newest worker had not left in order.
        unranked: Whether a worker without a rank had not left in order.
    """

    states: Counter[str] = field(default_factory=Counter)
    done: int = 0
    lost_ranks: set[int] = field(default_factory=set)
    unranked: bool = False

    def add(self, member: Member, is_newest: bool) -> None:
        """Add a member. is_newest: no later member has its rank."""
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
        """Return whether the newest worker of a rank other than these did not leave in order."""
        return self.unranked or not self.lost_ranks.issubset(ranks)

    def state(self) -> dict[str, Any]:
        """Return the totals as JSON values for `recovered`."""
        ranks = sorted(self.lost_ranks)
        return {
            "states": dict(self.states),
            "done": self.done,
            "lost_ranks": ranks,
            "unranked": self.unranked,
        }

    @staticmethod
    def recovered(state: Mapping[str, Any]) -> "DepartedTotals":
        """Return the totals whose `state` this is, or none for an empty one."""
        if not state:
            return DepartedTotals()
        return DepartedTotals(
            Counter(state["states"]), state["done"], set(state["lost_ranks"]), state["unranked"]
        )


class WorkerRun:
    """The run of scripts that is in progress: which of its workers are done.

    Attributes:
        dropped: Totals of the members of all runs that are not listed any more.

    Args:
        members: Current and departed members by number; their owner keeps it up to date.
        current: The current members, likewise.
    """

    def __init__(self, members: Mapping[int, Member], current: Sequence[Member]) -> None:
        self.dropped = DepartedTotals()
        self._members = members
        self._current = current
        self._done_in_earlier_run: frozenset[int] = frozenset()
        self._dropped_in_earlier_run = 0

    @property
    def done_count(self) -> int:
        """Number of workers that took part in this run and left without giving a reason."""
        return (
            len(self._done() - self._done_in_earlier_run)
            + self.dropped.done
            - self._dropped_in_earlier_run
        )

    def _done(self) -> set[int]:
        return {m.worker for m in self._members.values() if m.is_done}

    def is_done(self, min_workers: int) -> bool:
        """Return whether at least this number of workers is done and no member is left."""
        return not self._current and self.done_count >= min_workers

    def begin_next(self, min_workers: int) -> None:
        """Start another run if the last one is done; its workers then do not count as done."""
        if self.is_done(min_workers):
            self._done_in_earlier_run = frozenset(self._done())
            self._dropped_in_earlier_run = self.dropped.done

    def add_dropped(self, member: Member, is_newest: bool) -> None:
        """Add a member that is not listed any more to the totals."""
        self.dropped.add(member, is_newest)
        self._dropped_in_earlier_run += (
            member.is_done and member.worker in self._done_in_earlier_run
        )
