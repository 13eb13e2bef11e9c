"""The garbage collector rests while much is imported, and works as before afterwards."""

import gc
from collections.abc import Iterator

import pytest

from pscommon.core.errors import InvalidRequestError
from pscommon.system.imports import quick_imports


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_nothing_is_collected_inside_and_what_was_made_there_is_left_out_later() -> None:
    with quick_imports():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]

    assert gc.isenabled()
    assert gc.get_freeze_count() > len(made)


def test_the_collector_works_again_after_an_import_that_fails() -> None:
    with pytest.raises(ImportError), quick_imports():
        raise ImportError

    assert gc.isenabled()


def test_whoever_has_switched_it_off_keeps_it_off() -> None:
    gc.disable()
    try:
        with quick_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["torch", "torch._C"])
def test_a_package_that_cannot_be_loaded_is_named_with_what_to_do(name: str) -> None:
    with (
        pytest.raises(InvalidRequestError, match="torch cannot be imported: no libgomp"),
        quick_imports(),
    ):
        raise ImportError("no libgomp", name=name)


@pytest.mark.parametrize("name", ["psserver.app", "pscommon"])
def test_a_module_of_ours_that_cannot_be_loaded_is_a_bug(name: str) -> None:
    with pytest.raises(ImportError, match="no such module"), quick_imports():
        raise ImportError("no such module", name=name)
