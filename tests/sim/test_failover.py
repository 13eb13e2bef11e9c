"""Simulated failovers: every history keeps the invariants, and each planted bug is found."""

from collections import Counter

import pytest

from psserver.core.shard.failover import FailoverMachine, PrimaryRecord
from psserver.core.shard.replication import ReplicationMachine, ReplicationPhase
from tests.sim.failover_world import FailoverWorld
from tests.sim.invariants import InvariantError

SEEDS = 200


def test_no_history_loses_a_published_record_or_has_two_primaries() -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        world = FailoverWorld(seed).run()
        seen["took over"] += world.takeovers > 0
        seen["deposed"] += world.depositions > 0
        seen["alone"] += world.ticks_alone > 0
        seen["planned"] += world.handovers > 0
        seen["rounds"] += len(world.published)

    assert min(seen["took over"], seen["deposed"], seen["alone"], seen["planned"]) > SEEDS // 10
    assert seen["rounds"] > 50 * SEEDS


@pytest.mark.full
def test_promotions_without_a_lock_leave_one_primary_and_handovers_lose_nothing() -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        world = FailoverWorld(seed, has_lock=False).run()
        seen["outdated"] += world.takeovers > world.handovers
        seen["planned"] += world.handovers > 0
        seen["alone"] += world.ticks_alone > 0
        seen["rounds"] += len(world.published)

    assert min(seen["planned"], seen["alone"], seen["outdated"]) > SEEDS // 10
    assert seen["rounds"] > 50 * SEEDS


class TakesOverWithoutTheSwap(FailoverMachine):
    """Takes over after silence, without a swap of the primary record."""

    def take_over(self) -> PrimaryRecord | None:
        return PrimaryRecord(self.term + 1, self.standby_id) if self.has_state else None


class ContinuesAloneWithoutTheSwap(ReplicationMachine):
    """Drops its standby after silence, without a swap of the primary record."""

    def drop_link(self, link_id: int) -> None:
        if link_id == self.link_id:
            self.phase, self.standby_id = ReplicationPhase.ALONE, ""


class RepliesBeforeAcknowledgement(ReplicationMachine):
    """Does not wait for its standby."""

    def can_reply(self, link_id: int, number: int) -> bool:
        return not self.deposed_reason


class ContinuesDuringHandover(ReplicationMachine):
    """Continues alone when the link is lost during a handover."""

    def drop_link(self, link_id: int) -> None:
        if (
            link_id == self.link_id
            and self.phase is not ReplicationPhase.ALONE
            and (self.phase is not ReplicationPhase.IN_SYNC or self._swap_in_sync(""))
        ):
            self.phase, self.standby_id = ReplicationPhase.ALONE, ""


MUTANTS: dict[str, dict[str, object]] = {
    "a primary continues alone during a handover": {
        "replication_class": ContinuesDuringHandover,
        "has_lock": False,
    },
    "a standby takes over without the swap": {"failover_class": TakesOverWithoutTheSwap},
    "a primary continues alone without the swap": {
        "replication_class": ContinuesAloneWithoutTheSwap
    },
    "a reply leaves before the acknowledgement": {
        "replication_class": RepliesBeforeAcknowledgement
    },
    "a lower term is followed": {"follows_lower_terms": True, "has_lock": False},
}


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bug_is_found(name: str) -> None:
    def histories() -> None:
        for seed in range(SEEDS):
            FailoverWorld(seed, **MUTANTS[name]).run()

    with pytest.raises(InvariantError):
        histories()
