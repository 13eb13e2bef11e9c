"""The garbage collector pauses during large imports and works as before afterwards."""

import gc
from collections.abc import Iterator

import pytest

from pscommon.core.errors import InvalidRequestError
from pscommon.system.imports import quick_imports


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_nothing_is_collected_inside_and_its_objects_are_frozen() -> None:
    with quick_imports():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]

    assert gc.isenabled()
    assert gc.get_freeze_count() > len(made)


def test_the_collector_is_enabled_again_after_a_failed_import() -> None:
    with pytest.raises(ImportError), quick_imports():
        raise ImportError

    assert gc.isenabled()


def test_a_disabled_collector_stays_disabled() -> None:
    gc.disable()
    try:
        with quick_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["torch", "torch._C"])
def test_a_package_that_cannot_be_loaded_is_named_with_a_remedy(name: str) -> None:
    with (
        pytest.raises(InvalidRequestError, match="torch cannot be imported: no libgomp"),
        quick_imports(),
    ):
        raise ImportError("no libgomp", name=name)


@pytest.mark.parametrize("name", ["psserver.app", "pscommon"])
def test_a_failed_import_of_an_own_module_is_an_internal_error(name: str) -> None:
    with pytest.raises(ImportError, match="no such module"), quick_imports():
        raise ImportError("no such module", name=name)
