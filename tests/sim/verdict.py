"""Checks of a whole simulated history, against the world's own record of pushes."""

import math
from collections import Counter
from typing import TYPE_CHECKING

from pscommon.core.limits import WORKERS_PER_GENERATION
from pscommon.core.log_entries import Apply
from psserver.core.shard.state_machine import PushOutcome
from tests.sim.arrays import WEIGHT_COUNT
from tests.sim.invariants import check
from tests.sim.workers import Push

if TYPE_CHECKING:
    from tests.sim.world import World


def check_outcome(world: "World", push: Push, outcome: PushOutcome) -> None:
    """Check an outcome that a worker has received.

    Outcomes of workers from before a rollback are not checked.
    """
    if push.staged.key.worker < WORKERS_PER_GENERATION * world.generation:
        return
    staged = push.staged
    if outcome.status == "applied" and not staged.samples:
        check(outcome.version == staged.base, "version {} has buffers of {}", outcome, staged.base)
    elif outcome.status == "applied" and outcome.detail != "long ago":
        counted = [c.key for c in world.updates[outcome.version - 1].contributions]
        check(
            push.staged.key in counted,
            "push {} was acknowledged but does not count",
            push.staged.key,
        )


def verify_batches(world: "World") -> bool:
    """Check that each push and batch of a training counts once.

    Updates that a rollback discarded are not repeated if all workers of the newest generation
    were asked to leave. Return whether that is so.
    """
    history = [tuple(c.key for c in apply.contributions) for apply in world.updates]
    counted = [key for keys in history for key in keys]
    check(len(counted) == len(set(counted)), "a push counts twice")
    decided = counted + [reject.key for reject in world.rejections]
    batches = sorted(batch.number for key in decided for batch in world.pushes[key].staged.batches)
    newest = WORKERS_PER_GENERATION * world.generation
    have_all_left = world.generation and all(
        w.is_draining for w in world.workers if (w.worker or 0) > newest
    )
    expected = sorted(set(batches)) if have_all_left else list(range(world.loop.total))
    check(batches == expected, "counted batches: {} of {}", batches, world.loop.total)
    return bool(have_all_left)


def verify(world: "World") -> None:
    """Check that pushes and batches count once, and that the weights are sums of the pushes."""
    have_all_left = verify_batches(world)
    if have_all_left and not world.coordinator.job.begun:
        return  # there are no weights
    verify_sums(world)
    verify_counts(world)
    scenario = world.scenario
    if scenario.is_reproducible and scenario.without_faults != scenario:
        reference = type(world)(scenario.without_faults)
        reference.run()
        same = world.weights == reference.weights or (
            world.can_bits_differ and are_close(world.weights, reference.weights)
        )
        check(same, "weights {} with faults, {} without", world.weights, reference.weights)


def verify_counts(world: "World") -> None:
    """Check the number of updates of each optimizer, and that an update has one optimizer."""
    found: Counter[str] = Counter()
    for apply in world.updates:
        names = {world.pushes[c.key].staged.optimizer for c in apply.contributions}
        check(len(names) == 1, "version {} is an update of optimizers {}", apply.version, names)
        found.update(names - {""})
    counts = world.coordinator.job.updates
    check(counts == found, "the job counts {}, not {}", counts, dict(found))


def verify_sums(world: "World") -> None:
    """Check that each update is the weighted mean of its pushes, summed in worker order."""
    check(len(world.weights) == WEIGHT_COUNT, "the model has {} weights", len(world.weights))
    for apply in world.updates:
        verify_scale(world, apply)
    for index, found in enumerate(world.weights):
        weight = 1.0
        for apply in world.updates:
            pushes = [world.pushes[c.key] for c in apply.contributions]
            pushes.sort(key=lambda p: (p.rank, p.staged.key.worker))
            total, mean = sum(p.staged.samples for p in pushes), 0.0
            scale = apply.contributions[0].scale
            for push in pushes:
                mean += push.gradients[index] * (push.staged.samples / total * scale)
            weight -= mean
        check(weight == found, "weight {} is {}, not {}", index, found, weight)


def verify_scale(world: "World", apply: Apply) -> None:
    """Check that the scale of an update is that of torch's clip_grad_norm_ for its average."""
    clip_norm = world.scenario.clip_norm
    total = sum(c.samples for c in apply.contributions)
    means = [
        sum(world.pushes[c.key].gradients[index] * (c.samples / total) for c in apply.contributions)
        for index in range(WEIGHT_COUNT)
    ]
    norm = math.sqrt(sum(mean * mean for mean in means))
    expected = 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))
    for contribution in apply.contributions:
        close = math.isclose(contribution.scale, expected, rel_tol=1e-9)
        check(
            close, "push {} is scaled by {}, not {}", contribution.key, contribution.scale, expected
        )


def are_close(first: list[float], second: list[float]) -> bool:
    return all(
        math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-6) for a, b in zip(first, second, strict=True)
    )
