"""Random histories under policy allreduce keep every invariant, and each planted bug is found."""

from collections import Counter

import pytest

from tests.sim.reduce_mutants import PATCHES
from tests.sim.reduce_world import ReduceWorld, reducing

SEEDS = 200
FULL_SEEDS, PARTS = 6000, 6


def run(seed: int) -> ReduceWorld:
    world = ReduceWorld(reducing(seed))
    world.run()
    return world


def test_histories_keep_every_invariant() -> None:
    """They contain enough of each fault, and void rounds among them."""
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        world = run(seed)
        job = world.coordinator.job
        seen["updates"] += job.version
        seen["lost"] += any(member.state == "lost" for member in world.coordinator.membership)
        seen["void"] += job.counts["stale"] > 0
        seen["rollback"] += world.rollbacks > 0
        seen["snapshot"] += world.snapshot is not None
        seen["weights lost"] += world.failures > 0

    assert min(seen.values()) >= 5, seen


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
def test_thousands_of_histories_keep_every_invariant(part: int) -> None:
    """A part ends within the time limit of a test on a busy machine."""
    for seed in range(SEEDS + part, FULL_SEEDS, PARTS):
        run(seed)


@pytest.mark.parametrize("name", list(PATCHES))
def test_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*PATCHES[name])

    def histories() -> None:
        for seed in range(SEEDS):
            run(seed)

    with pytest.raises(AssertionError):
        histories()
