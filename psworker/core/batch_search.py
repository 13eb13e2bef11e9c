"""The search for a batch size: which size to try next, the knee, and the learning rate there."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

KNEE_RATIO = 0.9
"""Part of the best throughput that the knee reaches."""

GAIN_RATIO, FLAT_COUNT = 1.05, 2
"""The search ends when FLAT_COUNT sizes in a row have less than GAIN_RATIO times the best
throughput before them: one alone may be slow because of other work on the machine.
"""

Rule = Literal["linear", "square root"]

RULES: Mapping[str, Rule] = {
    # P. Goyal et al., Accurate, Large Minibatch SGD, 2017 (arXiv:1706.02677)
    "sgd": "linear",
    # S. Malladi et al., On the SDEs and Scaling Rules for Adaptive Gradient Algorithms, 2022
    # (arXiv:2205.10287)
    **dict.fromkeys(("adam", "adamw", "adamax", "nadam", "radam", "rmsprop"), "square root"),
}
"""How the learning rate of an optimizer follows the batch size; others have no known rule."""


class BatchTry(NamedTuple):
    """What a script has done with one batch size.

    Attributes:
        batch_size: Samples in a batch.
        samples_per_second, step_seconds: Its speed; None if it was not measured.
        memory: Largest resident memory of the script's process, in bytes; None: not known.
        gpu_memory: Largest memory of tensors on its GPU, in bytes; None: it used none.
        problem: Why there are no measurements; empty if there are.
        is_out_of_memory: Memory was too small.
    """

    batch_size: int
    samples_per_second: float | None = None
    step_seconds: float | None = None
    memory: int | None = None
    gpu_memory: int | None = None
    problem: str = ""
    is_out_of_memory: bool = False


class Limits(NamedTuple):
    """Where a search ends.

    Attributes:
        largest: The largest batch size; None: no limit.
        largest_reason: Why it is the largest.
        memory: Memory of the machine, in bytes.
    """

    largest: int | None
    largest_reason: str
    memory: int


def first_size(own: int) -> int:
    """Return the smallest size to try: a quarter of the script's own, if doubling leads to it."""
    return next(own // part for part in (4, 2, 1) if own % part == 0)


def next_size(tries: Mapping[int, BatchTry], start: int, limits: Limits) -> int | str:
    """Return the batch size to try next, or why the search ends.

    Sizes double from `start`. Any size may have been tried before, such as the script's own.

    Args:
        tries: The results so far, by batch size.
        start: The smallest size.
        limits: Where the search ends in any case.
    """
    best, flat, size = 0.0, 0, start
    while (done := tries.get(size)) is not None:
        rate = done.samples_per_second
        if rate is not None:
            flat = flat + 1 if rate < GAIN_RATIO * best else 0
            if flat == FLAT_COUNT:
                return "larger batches are no faster"
            best = max(best, rate)
        elif not done.is_out_of_memory and not _works_above(tries, size):
            return f"the script {done.problem} with a batch of {size}"
        size *= 2
    if any(size > each.batch_size for each in tries.values() if each.is_out_of_memory):
        return "memory is too small for larger batches"
    if limits.largest is not None and size > limits.largest:
        return limits.largest_reason
    if (needed := _expected_memory(tries, size)) > limits.memory:
        return f"a batch of {size} needs about {needed / 1e9:.1f} GB of memory"
    return size


def _works_above(tries: Mapping[int, BatchTry], size: int) -> bool:
    return any(each.batch_size > size and not each.problem for each in tries.values())


def _expected_memory(tries: Mapping[int, BatchTry], size: int) -> float:
    """Return the memory at this size, on the line through the two largest sizes; else 0.

    Work on a GPU ends by itself where its memory does.
    """
    known = sorted(
        (each.batch_size, each.memory)
        for each in tries.values()
        if each.memory is not None and each.gpu_memory is None and not each.problem
    )
    if len(known) < 2 or size < known[-1][0]:
        return 0.0
    (smaller, before), (larger, after) = known[-2:]
    return after + max(0.0, (after - before) / (larger - smaller)) * (size - larger)


def find_knee(tries: Sequence[BatchTry]) -> BatchTry | None:
    """Return the smallest batch with KNEE_RATIO of the best throughput; None without results."""
    best = max((each.samples_per_second or 0.0 for each in tries), default=0.0)
    fast = [each for each in tries if (each.samples_per_second or 0.0) >= KNEE_RATIO * best > 0]
    return min(fast, key=lambda each: each.batch_size, default=None)


def scale_factor(kind: str, ratio: float) -> float | None:
    """Return the factor of an optimizer's learning rate; None: no rule is known.

    Args:
        kind: The optimizer, as in OptimizerSettings.
        ratio: The new batch size by the old one.
    """
    rule = RULES.get(kind)
    if rule is None:
        return None
    return ratio if rule == "linear" else math.sqrt(ratio)
