"""Fixtures that fault tests share."""

import pytest

from tests.support.cluster import cluster
from tests.support.protection import protect_this_process

__all__ = ["cluster"]


@pytest.fixture(scope="session", autouse=True)
def protected() -> None:
    """Use certificates and tokens if the environment names them: `make test-tls`."""
    protect_this_process()
