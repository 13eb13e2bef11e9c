"""What a simulated world must never do, from its own record of who pushed what."""

import math
from typing import TYPE_CHECKING

from pscommon.core.log_entries import Apply
from psserver.core.shard.state_machine import PushOutcome
from psserver.core.workers.membership import WORKERS_PER_GENERATION
from tests.sim.arrays import UNITS
from tests.sim.invariants import check
from tests.sim.workers import Push

if TYPE_CHECKING:
    from tests.sim.world import World


def check_outcome(world: "World", push: Push, outcome: PushOutcome) -> None:
    """A worker has been told that this is how its push ended. All may have gone back since the
    shards said so.
    """
    if push.staged.key.worker < WORKERS_PER_GENERATION * world.generation:
        return
    if outcome.status == "applied" and outcome.detail != "long ago":
        counted = [c.key for c in world.decided[outcome.version - 1].contributions]
        check(push.staged.key in counted, "{} was acknowledged and did not count", push.staged.key)


def verify(world: "World") -> None:
    """All shards counted the same pushes, each batch once, and the weights are their sums.

    Lost updates are not repeated if all workers of the newest generation were asked to leave.
    """
    history = [tuple(c.key for c in apply.contributions) for apply in world.decided]
    counted = [key for keys in history for key in keys]
    check(len(counted) == len(set(counted)), "a push counted twice")
    done = counted + [reject.key for reject in world.dropped]
    batches = sorted(batch.number for key in done for batch in world.pushes[key].staged.batches)
    newest = WORKERS_PER_GENERATION * world.generation
    deserted = world.generation and all(
        w.draining for w in world.workers if (w.worker or 0) > newest
    )
    expected = sorted(set(batches)) if deserted else list(range(world.loop.total))
    check(batches == expected, "batches that counted: {} of {}", batches, world.loop.total)
    if deserted and not world.coordinator.begun:
        return  # there are no weights
    verify_sums(world)
    scenario = world.scenario
    if scenario.is_reproducible and scenario.quiet != scenario:
        quiet = type(world)(scenario.quiet)
        quiet.run()
        same = world.weights == quiet.weights or (
            world.is_inexact and are_close(world.weights, quiet.weights)
        )
        check(same, "disturbed, the weights are {}, else {}", world.weights, quiet.weights)


def verify_sums(world: "World") -> None:
    """Replay: the weighted mean in worker order, wherever and whenever the pushes arrived."""
    check(len(world.weights) == UNITS, "there are {} weights", len(world.weights))
    for apply in world.decided:
        verify_scale(world, apply)
    for unit, found in enumerate(world.weights):
        weight = 1.0
        for apply in world.decided:
            pushes = [world.pushes[c.key] for c in apply.contributions]
            pushes.sort(key=lambda p: (p.rank, p.staged.key.worker))
            total, mean = sum(p.staged.samples for p in pushes), 0.0
            scale = apply.contributions[0].scale
            for push in pushes:
                mean += push.gradients[unit] * (push.staged.samples / total * scale)
            weight -= mean
        check(weight == found, "unit {}: {} is not {}", unit, found, weight)


def verify_scale(world: "World", apply: Apply) -> None:
    """Each update is scaled by what torch's clip_grad_norm_ gives for the norm of its average,
    on all shards.
    """
    clip_norm = world.scenario.clip_norm
    total = sum(c.samples for c in apply.contributions)
    means = [
        sum(world.pushes[c.key].gradients[unit] * (c.samples / total) for c in apply.contributions)
        for unit in range(UNITS)
    ]
    norm = math.sqrt(sum(mean * mean for mean in means))
    expected = 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))
    for contribution in apply.contributions:
        close = math.isclose(contribution.scale, expected, rel_tol=1e-9)
        check(close, "{} is scaled by {}, not {}", contribution.key, contribution.scale, expected)


def are_close(some: list[float], others: list[float]) -> bool:
    return all(
        math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-6) for a, b in zip(some, others, strict=True)
    )
