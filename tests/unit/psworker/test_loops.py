"""The place of a script: the passes that it is in, may still begin, or has left."""

from types import SimpleNamespace
from typing import Any

import pytest

from pscommon.core.errors import InvalidRequestError
from pscommon.core.script_place import PassName, ScriptPlace
from psworker.session.open_loops import OpenLoops


class Iterator:
    """Iterator or loader that the script stores."""


def batches(name: PassName) -> Any:
    return SimpleNamespace(name=name)


def run_passes(loops: OpenLoops, count: int) -> list[PassName]:
    """Run passes of one loader one after another to their ends."""
    names = []
    for _ in range(count):
        iterator = Iterator()
        names.append(loops.make("train", iterator))
        leased = batches(names[-1])
        loops.begin(leased, trains=True)
        loops.passed(leased.name)
        loops.end(leased, 1)
    return names


@pytest.mark.parametrize(
    ("ended", "again"),
    [({0, 1, 2}, False), ({0, 1}, True), ({1, 2}, True), (set(), True)],
)
def test_a_pass_that_has_not_ended_on_the_servers_comes_again(ended: set[int], again: bool) -> None:
    loops = OpenLoops()
    run_passes(loops, 3)

    assert loops.come_again(lambda name: name.number in ended, 1) is again


def test_a_pass_inside_an_open_pass_does_not_come_again_alone() -> None:
    loops = OpenLoops()
    outer, inner = batches(PassName("train", 0)), batches(PassName("test", 0))
    loops.begin(outer, trains=True)
    loops.begin(inner, trains=False)
    loops.passed(inner.name)
    loops.end(inner, 1)

    assert not loops.come_again(lambda name: False, 0)


def test_a_pass_without_an_iterator_is_left() -> None:
    loops, stored, dropped = OpenLoops(), Iterator(), Iterator()
    first, second = loops.make("a", dropped), loops.make("b", stored)
    third = loops.make("c", Iterator())
    loops.begin(batches(third), trains=True)
    assert not loops.place().has_left(first)

    del dropped
    assert loops.place().has_left(first)
    assert not loops.place().has_left(second)
    loops.discard(second)
    assert loops.place().has_left(second)
    assert not loops.place().has_left(third)
    assert not loops.place().has_left(PassName("b", 1)), "its loader can begin it"
    assert not loops.place().has_left(PassName("unknown", 0)), "perhaps it comes later"


def test_a_stored_pass_is_left_once_two_outermost_passes_have_begun() -> None:
    loops, stored = OpenLoops(), Iterator()
    name = loops.make("kept", stored)
    run_passes(loops, 1)
    assert not loops.place().has_left(name)
    run_passes(loops, 1)
    assert loops.place().has_left(name)


def test_deleted_unnamed_loaders_are_one_number() -> None:
    loops, first, second = OpenLoops(), Iterator(), Iterator()
    assert [loops.name_loader(each, None) for each in (first, second)] == ["0", "1"]
    assert loops.name_loader(first, "test") == "test"
    loops.make("0", Iterator())
    loops.make("1", Iterator())
    assert loops.place() == ScriptPlace(None, {"0": 1, "1": 1}, 0, 0)

    del first
    assert loops.place() == ScriptPlace(None, {"1": 1}, 1, 0)
    assert loops.place().has_left(PassName("0", 7))


@pytest.mark.parametrize("name", ["", "7", "x" * 300, "a\nb", 3])
def test_invalid_names_of_loaders_are_refused(name: Any) -> None:
    with pytest.raises(InvalidRequestError):
        OpenLoops().name_loader(Iterator(), name)


def test_only_outermost_passes_with_gradients_count_as_training() -> None:
    loops = OpenLoops()
    outer, inner, test = (
        batches(loops.make(name, Iterator())) for name in ("outer", "inner", "test")
    )
    loops.begin(outer, trains=True)
    loops.begin(inner, trains=True)
    loops.end(inner, 0)
    loops.end(outer, 0)
    loops.begin(test, trains=False)
    assert loops.place().training_passes == 1
