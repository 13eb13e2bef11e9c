"""One file a work: who is compared doing what. WORKS has them all, in the order in which they
run.
"""

from benchmarks.works import (
    clipping,
    decisions,
    durability,
    growth,
    many_tensors,
    memory,
    overlap,
    phases,
    push_pull,
    sizes,
    small_step,
    smallest,
    snapshots,
    standby,
    tail,
    training,
    two_workers,
    workers,
)
from benchmarks.works.work import Work

WORKS: tuple[Work, ...] = (
    push_pull.WORK,
    two_workers.WORK,
    smallest.WORK,
    small_step.WORK,
    many_tensors.WORK,
    tail.WORK,
    growth.WORK,
    training.WORK,
    workers.SMALL,
    workers.LARGE,
    decisions.WORK,
    phases.WORK,
    sizes.SMALL,
    sizes.LARGE,
    sizes.HUGE,
    overlap.WORK,
    memory.STEPS,
    memory.CROWD,
    durability.WORK,
    snapshots.WORK,
    standby.LARGE,
    standby.SMALL,
    clipping.LARGE,
    clipping.SMALL,
    clipping.ALONE,
)
