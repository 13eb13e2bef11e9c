"""Standbys in the test's process that follow real servers and never become primary."""

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from pscommon.wire.endpoint import Endpoint, open_channel
from pscommon.wire.requests import REPLICATE, Stub
from psproto.v1 import standby_pb2 as pb
from psserver.durability.state_records import checksum
from psserver.replication.lease_directory import lease_of
from psserver.replication.standby import Standby
from psserver.replication.standby_state import StandbyState
from psserver.server import Server
from tests.support.workers import until


class RunningStandby:
    """A standby of this server in a context. settings: replace those of the server."""

    def __init__(self, primary: Server, **settings: Any) -> None:
        self.primary = primary
        made = replace(
            primary.config, **{"bind": "127.0.0.1:0", "standby_of": primary.address, **settings}
        )
        self.standby = Standby(made, lease_of(made))
        self._thread = threading.Thread(target=self.standby.run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.standby.stop("the test is over")
        self._thread.join(20)
        assert not self._thread.is_alive()

    def in_sync(self) -> Self:
        until(lambda: self.primary.replicator.state == "in sync", "in sync")
        return self

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()


@contextmanager
def silent_standby(server: Server) -> Iterator[threading.Event]:
    """Acknowledge the state and every heartbeat, but no further record until the event is set."""
    newest_number, done, is_acknowledging = [0], threading.Event(), threading.Event()

    def requests() -> Iterator[pb.ReplicateRequest]:
        yield pb.ReplicateRequest(
            format=3, shard=0, shards=1, instance="silent", address="nowhere:1"
        )
        while not done.wait(0.05):
            if server.replicator.state == "loading" or is_acknowledging.is_set():
                yield pb.ReplicateRequest(received=newest_number[0])
            else:
                yield pb.ReplicateRequest(received=0)

    def receive(call: Any) -> None:
        try:
            for message in call:
                newest_number[0] = max(newest_number[0], message.number)
        except Exception:
            assert done.is_set()

    with closing(open_channel(Endpoint(server.address))) as channel:
        call = Stub(channel, REPLICATE)(requests())
        receiver = threading.Thread(target=receive, args=(call,))
        receiver.start()
        try:
            until(lambda: server.replicator.state == "in sync", "in sync")
            yield is_acknowledging
        finally:
            done.set()
            call.cancel()
            receiver.join()


def standby_state(following: RunningStandby) -> StandbyState:
    """Return the state of a standby."""
    found = following.standby._standby_state
    assert found is not None
    return found


def has_same_state(following: RunningStandby) -> bool:
    """Return whether the standby has the state of its primary."""
    engine, replica = following.primary.engine, standby_state(following).shard_state
    assert engine.live.store is not None
    assert replica.store is not None
    return (
        replica.machine.state() == engine.live.machine.state()
        and replica.staged.keys() == engine.live.state.staged.keys()
        and checksum(replica.store) == checksum(engine.live.store)
    )
