"""Hours that pass for a client in a moment: what it gives up after a time it gives up at once,
and nothing else.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from psproto.v1 import parameter_server_pb2 as ps
from psworker.client.client import Client
from psworker.core.clock import Clock
from tests.support.fake_server import FakeCluster, lost


def pushes(cluster: FakeCluster) -> list[ps.PushPullHeader]:
    return [header for header in cluster.received if header.seq]


def hour_skipper(client: Client) -> Callable[[], None]:
    """What is called to let an hour pass, for this client."""
    lane, passed = client._connection.transport, [0.0]
    clock = lane.clock
    lane.clock = Clock(lambda: clock.now() + passed[0], clock.sleep)

    def pass_by() -> None:
        passed[0] += 3600.0

    return pass_by


@contextmanager
def when_asked(cluster: FakeCluster, action: Callable[[], None]) -> Iterator[None]:
    """It happens once another push has come."""
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
    """A hook: the connection breaks, and that takes its time."""

    def hook() -> None:
        passes()
        lost()

    return hook
