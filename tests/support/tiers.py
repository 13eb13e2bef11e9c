"""Cases of one test that `make test` leaves out."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def cases(all_of_them: Iterable[tuple[Any, ...]], quick: Callable[..., bool]) -> list[Any]:
    """For pytest.mark.parametrize: the cases for which `quick` is true are in `make test`, all
    in `make test-all`.
    """
    return [
        pytest.param(*case, marks=() if quick(*case) else pytest.mark.full) for case in all_of_them
    ]
