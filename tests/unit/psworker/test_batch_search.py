"""Which batch sizes a search tries, where it ends, the knee, and the learning rate there."""

import math
from collections.abc import Callable, Mapping

import pytest

from psworker.core.batch_search import (
    BatchTry,
    Limits,
    find_knee,
    first_size,
    next_size,
    scale_factor,
)

NO_LIMITS = Limits(None, "", 1 << 60)


def measured(size: int, rate: float, memory: int = 1, gpu_memory: int | None = None) -> BatchTry:
    return BatchTry(size, rate, size / rate, memory, gpu_memory)


def searched(
    own: int, start: int, result: Callable[[int], BatchTry], limits: Limits = NO_LIMITS
) -> tuple[list[int], str]:
    """Return the sizes in the order of their tries, and why the search ends."""
    tries = {own: result(own)}
    while isinstance(size := next_size(tries, start, limits), int):
        assert size not in tries
        tries[size] = result(size)
    return [*tries], size


def rates(table: Mapping[int, float]) -> Callable[[int], BatchTry]:
    return lambda size: measured(size, table[size])


@pytest.mark.parametrize(
    ("own", "first"), [(64, 16), (30, 15), (25, 25), (1, 1), (2, 1), (4, 1), (6, 3)]
)
def test_doubling_leads_from_the_first_size_to_the_own(own: int, first: int) -> None:
    assert first_size(own) == first
    assert own in (first, 2 * first, 4 * first)


@pytest.mark.parametrize("largest", [64, 100, 127])
def test_sizes_double_to_the_largest(largest: int) -> None:
    limits = Limits(largest, "limit", 1 << 60)

    assert searched(16, 4, lambda size: measured(size, size), limits) == (
        [16, 4, 8, 32, 64],
        "limit",
    )


def test_the_own_size_need_not_be_a_double_of_the_start() -> None:
    limits = Limits(40, "limit", 1 << 60)

    assert searched(30, 8, lambda size: measured(size, size), limits) == ([30, 8, 16, 32], "limit")


@pytest.mark.parametrize(
    ("table", "last"),
    [
        ({4: 10, 8: 20, 16: 20.9, 32: 22, 64: 22.5, 128: 22.9}, 128),  # 32 gains 5.3 %
        ({4: 10, 8: 20, 16: 20.9, 32: 20.9}, 32),
        ({4: 10, 8: 20, 16: 5, 32: 5}, 32),
        ({4: 10, 8: 20, 16: 5, 32: 30, 64: 29, 128: 28}, 128),
    ],
)
def test_the_search_ends_where_larger_batches_are_no_faster(
    table: dict[int, float], last: int
) -> None:
    sizes, ended = searched(4, 4, rates(table))

    assert ended == "larger batches are no faster"
    assert sizes[-1] == last


def test_the_search_ends_where_memory_ends() -> None:
    def result(size: int) -> BatchTry:
        return measured(size, size) if size < 64 else BatchTry(size, is_out_of_memory=True)

    assert searched(16, 4, result) == (
        [16, 4, 8, 32, 64],
        "memory is too small for larger batches",
    )
    assert searched(64, 16, result)[0] == [64, 16, 32], "the own size, too, may be too large"
    assert searched(100, 16, result)[0] == [100, 16, 32, 64]


def test_memory_is_foreseen_on_the_line_through_the_two_largest_sizes() -> None:
    limits = Limits(None, "", int(10e9))

    def result(size: int, gpu_memory: int | None = None) -> BatchTry:
        return measured(size, size, int(1e9 + 1e8 * size), gpu_memory)

    sizes, ended = searched(8, 8, result, limits)
    assert sizes == [8, 16, 32, 64], "64 needs 7.4 GB"
    assert ended == "a batch of 128 needs about 13.8 GB of memory"

    limits = limits._replace(largest=500, largest_reason="limit")
    assert searched(8, 8, lambda size: result(size, 1), limits)[1] == "limit", "on a GPU"


def test_a_failure_ends_the_search_unless_a_larger_batch_works() -> None:
    def result(size: int) -> BatchTry:
        works = 8 <= size < 64
        return measured(size, size) if works else BatchTry(size, problem="failed with exit code 1")

    assert searched(16, 4, result) == (
        [16, 4, 8, 32, 64],
        "the script failed with exit code 1 with a batch of 64",
    )


def test_the_knee_is_the_smallest_batch_near_the_best_throughput() -> None:
    tries = [
        measured(8, 50),
        measured(16, 89),
        measured(32, 90),
        measured(64, 100),
        BatchTry(128, problem="ran out of memory", is_out_of_memory=True),
    ]

    knee = find_knee(tries)
    assert knee is not None
    assert knee.batch_size == 32
    assert find_knee(tries[::-1]) == knee
    assert find_knee(tries[-1:]) is None


def test_learning_rates_follow_the_rule_of_their_optimizer() -> None:
    assert scale_factor("sgd", 8) == 8
    assert scale_factor("sgd", 0.25) == 0.25
    assert scale_factor("adamw", 8) == math.sqrt(8)
    assert scale_factor("rmsprop", 4) == 2
    assert scale_factor("lion", 4) is None
