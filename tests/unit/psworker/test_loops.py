"""Where a script is among its loops."""

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from psworker.session.open_loops import OpenLoops


class Iterator:
    """What the script holds of a loop."""


def leases(loop: int) -> Any:
    return SimpleNamespace(loop=loop)


def pass_over(loops: OpenLoops, *numbers: int) -> None:
    """Loops in a row, each to its end."""
    for number in numbers:
        loop = leases(number)
        loops.begin(loop)
        loops.passed(number)
        loops.end(loop, 1)


@pytest.mark.parametrize(
    ("ended", "again"),
    [({0, 1, 2}, False), ({0, 1}, True), ({1, 2}, True), (set(), True)],
)
def test_servers_that_lack_the_end_of_a_loop_have_it_ahead_of_them(
    ended: set[int], again: bool
) -> None:
    loops = OpenLoops()
    pass_over(loops, 0, 1, 2)

    assert loops.come_again(ended.__contains__, 1) is again


def test_numbers_that_the_script_left_out_are_no_loops_of_before() -> None:
    loops = OpenLoops()
    pass_over(loops, 1, 4)

    assert not loops.come_again({1, 4}.__contains__, 1)
    assert loops.come_again({1}.__contains__, 1)


def test_a_loop_inside_another_may_come_again_with_it() -> None:
    loops = OpenLoops()
    outer, inner = leases(0), leases(1)
    loops.begin(outer)
    loops.begin(inner)
    loops.passed(1)
    loops.end(inner, 1)

    assert not loops.come_again(set().__contains__, 0)


def test_a_loop_whose_iterator_was_dropped_will_not_begin() -> None:
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
