"""Primaries and standbys of one shard: no history has two that close a round, and each planted
bug is caught.
"""

from collections import Counter

import pytest

from psserver.core.shard.failover import FailoverMachine
from psserver.core.shard.primary_lease import PrimaryRecord
from psserver.core.shard.replication import ReplicationMachine, ReplicationPhase
from tests.sim.servers import InvariantError
from tests.sim.succession import Succeeding

SEEDS = 200


def test_no_history_loses_what_was_told_or_has_two_primaries() -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        world = Succeeding(seed).run()
        seen["took over"] += world.takeovers > 0
        seen["deposed"] += world.deposed > 0
        seen["alone"] += world.alone > 0
        seen["planned"] += world.switches > 0
        seen["rounds"] += len(world.told)

    assert min(seen["took over"], seen["deposed"], seen["alone"], seen["planned"]) > SEEDS // 10
    assert seen["rounds"] > 50 * SEEDS


def test_without_a_lock_switches_lose_nothing_and_leave_one_primary() -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        world = Succeeding(seed, locked=False).run()
        assert world.takeovers == world.switches
        seen["planned"] += world.switches > 0
        seen["alone"] += world.alone > 0
        seen["rounds"] += len(world.told)

    assert min(seen["planned"], seen["alone"]) > SEEDS // 10
    assert seen["rounds"] > 50 * SEEDS


class TakesOverWithoutTheSwap(FailoverMachine):
    """Silence is enough for it."""

    def take_over(self) -> PrimaryRecord | None:
        return PrimaryRecord(self.term + 1, self.name) if self.loaded else None


class GoesOnAloneWithoutTheSwap(ReplicationMachine):
    """Silence is enough for it."""

    def lose(self, line: int) -> None:
        if line == self.line:
            self.phase, self.standby = ReplicationPhase.ALONE, ""


class TellsBeforeItIsAcknowledged(ReplicationMachine):
    """Does not wait for its standby."""

    def may_tell(self, line: int, number: int, now: float) -> bool:
        return not self.deposed


class AnswersAtOnce(FailoverMachine):
    """async: does not wait until the other one has looked."""

    @property
    def pause(self) -> float:
        return 0.0


class TakesOverBeforeItHasAll(ReplicationMachine):
    """Says that the standby has all, as soon as nothing more is told."""

    @property
    def handed_over(self) -> bool:
        return self._frozen is not None


class GoesOnWhenItsStandbyHangsUp(ReplicationMachine):
    """Also where it hands over to that one: a moment later it ends."""

    def lose(self, line: int) -> None:
        if (
            line == self.line
            and self.phase is not ReplicationPhase.ALONE
            and (self.phase is not ReplicationPhase.IN_SYNC or self._swap(""))
        ):
            self.phase, self.standby = ReplicationPhase.ALONE, ""


MUTANTS: dict[str, dict[str, object]] = {
    "a standby that lacks the end is handed over to": {"shipping_class": TakesOverBeforeItHasAll},
    "who hands over goes on when it is hung up on": {
        "shipping_class": GoesOnWhenItsStandbyHangsUp,
        "locked": False,
    },
    "a standby takes over without the swap": {"succession_class": TakesOverWithoutTheSwap},
    "a primary goes on alone without the swap": {"shipping_class": GoesOnAloneWithoutTheSwap},
    "a round is told before it is acknowledged": {"shipping_class": TellsBeforeItIsAcknowledged},
    "a lower term is followed": {"follows_lower_terms": True},
    "who takes over answers at once": {"succession_class": AnswersAtOnce},
}


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bug_is_caught(name: str) -> None:
    def histories() -> None:
        for seed in range(SEEDS):
            Succeeding(seed, **MUTANTS[name]).run()

    with pytest.raises(InvariantError):
        histories()
