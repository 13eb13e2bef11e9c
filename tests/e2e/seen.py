"""Which settings have a test that sees what they change: none may be added without one."""

from collections.abc import Callable
from typing import TypeVar

from pscommon import options

Test = TypeVar("Test", bound=Callable[..., None])


class Seen:
    """`@seen("lease")` on a test of the command `ps-<table>`; `check` at the end of the file."""

    def __init__(self, table: str) -> None:
        self._table = table
        self._keys: set[str] = set()

    def __call__(self, *keys: str) -> Callable[[Test], Test]:
        def mark(test: Test) -> Test:
            self._keys.update(keys)
            return test

        return mark

    def check(self, *others: "Seen") -> None:
        """others: of further files about the same command."""
        keys = self._keys.union(*(other._keys for other in others))
        assert keys == {option.key for option in options.TABLES[self._table]}
