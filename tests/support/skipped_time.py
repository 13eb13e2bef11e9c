"""Simulated hours for a client: operations that end after a timeout end at once."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from psproto.v1 import parameter_server_pb2 as ps
from psworker.client.client import Client
from psworker.core.clock import Clock
from tests.support.fake_job import lost
from tests.support.fake_server import FakeCluster


def pushes(cluster: FakeCluster) -> list[ps.PushPullHeader]:
    return [header for header in cluster.received if header.seq]


def hour_skipper(client: Client) -> Callable[[], None]:
    """Return a function that advances this client's clock by an hour."""
    lane, passed = client._connection.transport, [0.0]
    clock = lane.clock
    lane.clock = Clock(lambda: clock.now() + passed[0], clock.sleep)

    def pass_by() -> None:
        passed[0] += 3600.0

    return pass_by


@contextmanager
def when_asked(cluster: FakeCluster, action: Callable[[], None]) -> Iterator[None]:
    """Run the action when another push has arrived."""
    seen = len(pushes(cluster))

    def act() -> None:
        cluster.wait_until(lambda: len(pushes(cluster)) > seen)
        action()

    thread = threading.Thread(target=act)
    thread.start()
    try:
        yield
    finally:
        thread.join(20)


def lost_for(passes: Callable[[], None]) -> Callable[[], None]:
    """Return a hook that breaks the connection after `passes`."""

    def hook() -> None:
        passes()
        lost()

    return hook
