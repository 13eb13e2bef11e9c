"""The policy of --scale-workers in simulated jobs; planted bugs are found."""

from collections.abc import Callable, Mapping

import pytest

from psserver.core.job import worker_scaling
from psserver.core.job.worker_scaling import Decision, Observation, WorkerScaling
from tests.sim.scaling_world import (
    CURVES,
    HOUR_SECONDS,
    LARGEST,
    SMALLEST,
    Curve,
    World,
    acceptable,
)

MOMENTS = 200
TRIES_AN_HOUR = 6

Make = Callable[[], WorkerScaling]


def policy() -> WorkerScaling:
    return WorkerScaling(SMALLEST, LARGEST)


def check_curve(make: Make, curve: Curve, workers: int, noise: float, seed: int) -> None:
    """The number of workers becomes one that is worth it, and stays but for a try an hour."""
    world = World(make(), curve, seed, workers, noise).run(2 * HOUR_SECONDS)
    good, since = 0, world.now
    for _ in range(MOMENTS):
        world.run(2 * HOUR_SECONDS / MOMENTS)
        good += world.wanted in acceptable(curve)
    assert good >= 0.6 * MOMENTS, (good, world.decisions)
    assert len(world.decided_after(since)) <= 2 * TRIES_AN_HOUR, world.decisions


def check_straggler(make: Make, seed: int) -> None:
    """A slow worker leaves, once, and is not replaced by one that may be as slow."""
    world = World(make(), CURVES["linear"], seed, LARGEST, noise=0.05).run(HOUR_SECONDS / 2)
    slow, since = sorted(world.joined)[1], world.now
    world.slow[slow] = 3.0
    world.run(HOUR_SECONDS / 2)
    assert slow not in world.joined
    (decision,) = world.decided_after(since)
    assert (decision.straggler, decision.wanted) == (slow, LARGEST - 1)


def check_losses(make: Make, seed: int) -> None:
    """A worker that is restarted changes nothing; one that does not return is not waited for."""
    world = World(make(), CURVES["linear"], seed, LARGEST, noise=0.05).run(HOUR_SECONDS / 2)
    assert world.wanted == LARGEST, world.decisions
    since = world.now
    for _ in range(5):
        world.lose(min(world.joined))
        world.run(60.0)
    assert not world.decided_after(since)
    world.capacity = LARGEST - 1
    world.lose(min(world.joined))
    world.run(HOUR_SECONDS / 2)
    first, *further = world.decided_after(since)
    assert first.wanted == LARGEST - 1
    assert len(further) <= 2
    assert all(decision.wanted < LARGEST for decision in further)


def check_long_steps(make: Make) -> None:
    """A measurement may take longer than a launcher has to follow."""
    world = World(make(), lambda n: 20.0, 1, SMALLEST).run(4 * HOUR_SECONDS)
    assert max(decision.wanted for _, decision in world.decisions) == LARGEST, world.decisions


def check_bounds(make: Make) -> None:
    """A number beyond the bounds is corrected at once."""
    for workers, bound in ((LARGEST + 3, LARGEST), (0, SMALLEST)):
        seen = Observation(workers, {1: 1.0}, 0, 0)
        decision = make().observe(seen, 1.0)
        assert decision is not None
        assert decision.wanted == bound


def check_all(make: Make) -> None:
    check_bounds(make)
    check_long_steps(make)
    for name, curve in CURVES.items():
        for workers in (1, LARGEST):
            check_curve(make, curve, workers, noise=0.1, seed=len(name))
    check_straggler(make, 1)
    check_losses(make, 2)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("name", CURVES)
def test_the_number_of_workers_becomes_one_that_is_worth_it(
    name: str, noise: float, seed: int
) -> None:
    check_curve(policy, CURVES[name], 1 + seed % LARGEST, noise, seed)


@pytest.mark.parametrize("seed", range(3))
def test_a_straggler_leaves_once(seed: int) -> None:
    check_straggler(policy, seed)


@pytest.mark.parametrize("seed", range(3))
def test_losses_of_workers_cause_no_oscillation(seed: int) -> None:
    check_losses(policy, seed)


def test_steps_of_20_seconds() -> None:
    check_long_steps(policy)


def test_bounds() -> None:
    check_bounds(policy)


def test_a_job_that_does_not_train_keeps_its_workers() -> None:
    """As in a long evaluation: no sample counts."""
    scaling = policy()
    for tick in range(10_000):
        seen = Observation(3, {1: None, 2: None, 3: None}, 0, 0)
        assert scaling.observe(seen, float(tick)) is None


def test_a_rollback_does_not_count_as_slow() -> None:
    world = World(policy(), CURVES["linear"], 1, 1)
    for _ in range(100):
        world.samples = world.samples * 9 // 10
        world.run(30.0)
    assert world.wanted == LARGEST


class Swapped(WorkerScaling):
    """Takes the number with fewer workers for the larger one."""

    def _by_gain(self, wanted: int, is_trial: bool) -> Decision | None:
        self._gains = {n: gain._replace(value=-gain.value) for n, gain in self._gains.items()}
        return super()._by_gain(wanted, is_trial)


class Impatient(WorkerScaling):
    """Does not notice that the wanted number has changed."""

    def observe(self, seen: Observation, now: float) -> Decision | None:
        before = self._since
        same = self._known[0] == seen.paces.keys()
        if same and self._known[1] != seen.wanted:
            self._known = self._known[0], seen.wanted
        decision = super().observe(seen, now)
        assert not same or self._since == before
        return decision


class Hasty(WorkerScaling):
    """Adds two workers at a time."""

    def observe(self, seen: Observation, now: float) -> Decision | None:
        decision = super().observe(seen, now)
        if decision is not None and decision.wanted > seen.wanted:
            return decision._replace(wanted=decision.wanted + 1)
        return decision


class Blind(WorkerScaling):
    """Sees no straggler."""

    def _straggler(self) -> int | None:
        return None


class Loyal(WorkerScaling):
    """Never lets a worker go whose gain is small."""

    def _by_gain(self, wanted: int, is_trial: bool) -> Decision | None:
        decision = super()._by_gain(wanted, is_trial)
        return None if decision is not None and decision.wanted < wanted else decision


class Forgetful(WorkerScaling):
    """Tries a number again that was not worth it."""

    def _by_gain(self, wanted: int, is_trial: bool) -> Decision | None:
        decision = super()._by_gain(wanted, is_trial)
        self._gains.clear()
        return decision


BUGS = [Swapped, Impatient, Hasty, Blind, Loyal, Forgetful]
CONSTANTS: Mapping[str, float] = {
    "GAIN_SECONDS": 30.0,
    "FOLLOW_SECONDS": 5.0,
    "ADDING_GAIN_RATIO": 2.0,
    "STAYING_GAIN_RATIO": -1.0,
    "STRAGGLER_FACTOR": 1.01,
}
"""Values with which the policy is wrong."""


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: type[WorkerScaling]) -> None:
    with pytest.raises(AssertionError):
        check_all(lambda: bug(SMALLEST, LARGEST))


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_wrong_constant_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_scaling, name, CONSTANTS[name])

    with pytest.raises((AssertionError, ValueError)):
        check_all(policy)
