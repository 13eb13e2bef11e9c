"""Assertions about errors that users see."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pscommon.core.errors import (
    PSError,
)


@contextmanager
def refused(error: type[PSError], code: int, reason: str, *texts: str) -> Iterator[None]:
    """Check that the body fails with this error, whose message contains these texts."""
    with pytest.raises(error) as caught:
        yield
    assert (caught.value.exit_code, caught.value.reason) == (code, reason)
    for text in texts:
        assert text in str(caught.value)
