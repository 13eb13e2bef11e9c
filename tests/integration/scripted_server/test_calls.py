"""An exchange may take as long as its bytes move; one without progress is ended."""

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from pscommon.core.errors import UnreachableError
from pscommon.core.model_spec import OptimizerSettings
from psworker.client.client import Client
from tests.support.fake_server import FakeCluster

SGD = OptimizerSettings("sgd", ({"lr": 0.5},))
ONES = {"w": np.ones(10 * (1 << 18), np.float32)}
"""Ten frames."""

CONNECT_TIMEOUT_SECONDS = 1.0
"""Seconds that a server may be silent. The client adds two seconds without progress for the
server's work on large messages.
"""


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(lease=0.05) as cluster:
        yield cluster


def connect(cluster: FakeCluster) -> Client:
    return Client(cluster.addresses, connect_timeout=CONNECT_TIMEOUT_SECONDS, wait_timeout=20.0)


def slowly(number: int) -> None:
    """Return a hook for frames: all ten take four seconds."""
    threading.Event().wait(0.4)


@pytest.mark.full
@pytest.mark.parametrize(
    "hooks", [lambda c: c.incoming, lambda c: c.outgoing], ids=["push", "pull"]
)
def test_a_slow_exchange_completes(
    cluster: FakeCluster, hooks: Callable[[FakeCluster], dict[int, Callable[[int], None]]]
) -> None:
    with connect(cluster) as client:
        client.register(ONES, SGD)
        hooks(cluster)[0] = slowly

        assert client.push_pull(ONES).status == "applied"
        assert cluster.calls["Exchange"] == 3  # register, push and pull: no exchange was repeated


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "hooks", [lambda c: c.incoming, lambda c: c.outgoing], ids=["push", "pull"]
)
def test_an_exchange_without_progress_is_ended(
    cluster: FakeCluster, hooks: Callable[[FakeCluster], dict[int, Callable[[int], None]]]
) -> None:
    """Each attempt begins with progress."""
    goes_on = threading.Event()

    def stop(number: int) -> None:
        if number == 5:
            goes_on.wait()

    with connect(cluster) as client:
        client.register(ONES, SGD)
        hooks(cluster)[0] = stop
        try:
            with pytest.raises(
                UnreachableError,
                match=r"no bytes have moved between this worker and [\d.:]+ for 3 s \(tried for",
            ):
                client.push_pull(ONES)
        finally:
            goes_on.set()
