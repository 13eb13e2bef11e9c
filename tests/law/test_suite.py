"""The test suite: what its modules import, and which settings they cover."""

import pytest

from pscommon.settings import options
from tests.support.settings_coverage import settings_with_test
from tests.support.sources import Source, parse, suite


def imported_tests(source: Source) -> set[str]:
    """Return the test modules that this module imports."""
    return {
        name
        for name, _ in source.imports()
        if name.startswith("tests.") and name.rpartition(".")[2].startswith("test_")
    }


def test_no_module_imports_a_test_module() -> None:
    """Shared code is in tests/support."""
    found = [
        f"{source.path}: {sorted(names)}" for source in suite() if (names := imported_tests(source))
    ]

    assert not found, "\n".join(found)


@pytest.mark.parametrize("text", ["from tests.a.test_b import c", "from tests.a import test_b"])
def test_an_import_of_a_test_module_is_found(text: str) -> None:
    assert "tests.a.test_b" in imported_tests(parse(text))


@pytest.mark.parametrize("command", ["server", "worker", "run"])
def test_every_setting_has_a_test(command: str) -> None:
    """To fix it, add a mark of tests/support/settings_coverage.py to a test that fails
    without it.
    """
    assert settings_with_test(command) == {option.key for option in options.TABLES[command]}
