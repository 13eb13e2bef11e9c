"""The position of a script in its sequence of loops."""

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from psworker.session.open_loops import OpenLoops


class Iterator:
    """Iterator that the script stores."""


def leases(loop: int) -> Any:
    return SimpleNamespace(loop=loop)


def run_loops(loops: OpenLoops, *numbers: int) -> None:
    """Run these loops one after another to their ends."""
    for number in numbers:
        loop = leases(number)
        loops.begin(loop)
        loops.passed(number)
        loops.end(loop, 1)


@pytest.mark.parametrize(
    ("ended", "again"),
    [({0, 1, 2}, False), ({0, 1}, True), ({1, 2}, True), (set(), True)],
)
def test_a_loop_that_has_not_ended_on_the_servers_comes_again(ended: set[int], again: bool) -> None:
    loops = OpenLoops()
    run_loops(loops, 0, 1, 2)

    assert loops.come_again(ended.__contains__, 1) is again


def test_skipped_loop_numbers_do_not_come_again() -> None:
    loops = OpenLoops()
    run_loops(loops, 1, 4)

    assert not loops.come_again({1, 4}.__contains__, 1)
    assert loops.come_again({1}.__contains__, 1)


def test_a_loop_inside_an_open_loop_does_not_come_again_alone() -> None:
    loops = OpenLoops()
    outer, inner = leases(0), leases(1)
    loops.begin(outer)
    loops.begin(inner)
    loops.passed(1)
    loops.end(inner, 1)

    assert not loops.come_again(set().__contains__, 0)


def test_a_loop_without_an_iterator_is_not_open() -> None:
    loops, stored, dropped = OpenLoops(), Iterator(), Iterator()
    loops.make(0, dropped)
    loops.make(1, stored)
    loops.begin(leases(2))
    assert loops.first == 0

    del dropped
    gc.collect()
    assert loops.first == 1
    loops.discard(1)
    assert loops.first == 2
