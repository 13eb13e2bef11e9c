"""What a shard is told over its line to the coordinator."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from psproto.v1 import coordinator_pb2 as pb
from psserver.coordinator_servicer import Coordinator
from psserver.core.following import Way
from psserver.fleet import News, Picture, Server, Told

BEFORE = Picture(2, ["s0:1", "s1:1"], ["", "b1:1"], 0)


class HubThatMoves:
    """Once it has said what is new, a move to one shard ends."""

    job, waiting_for, over = "j", "", False

    def __init__(self) -> None:
        self.server = Server(1, "s1:1", connected=True, line=1)
        self.fleet: Any = [Server(0, term=3)]
        self.stopped = threading.Event()
        self.reshards = self.report = self.shard_down = Mock()

    def shard_up(self, *args: object) -> tuple[Server, int]:
        return self.server, self.server.line

    def news(self, server: Server, told: Told) -> News:
        fleet = SimpleNamespace(shards=1, addresses=["s0:1"], standbys=[""], layout=1, term=3)
        move = pb.Move(index=7, sources=BEFORE.addresses)
        self.fleet = type("After", (), {**vars(fleet), "__getitem__": lambda fleet, shard: fleet})()
        self.reshards.move.return_value = None
        return News(Told(5, 9, Way.RECOVER), 0, None, Way.RECOVER, None, [], [], BEFORE, move)


def test_all_that_a_shard_is_told_at_a_time_is_of_one_moment() -> None:
    """A way to follow that was found before a move ended, and the servers of after it, would lead astray."""
    over = threading.Event()

    def requests() -> Iterator[pb.LinkShardRequest]:
        yield pb.LinkShardRequest(shard=1, shards=2, address="s1:1", instance="i")
        over.wait()

    servicer: Any = Coordinator(HubThatMoves())  # type: ignore[arg-type]
    response = next(servicer.LinkShard(requests(), Mock()))
    over.set()

    assert (response.recover, response.shards, response.layout) == (True, 2, 0)
    assert (list(response.addresses), list(response.standbys)) == (BEFORE.addresses, BEFORE.standbys)
    assert list(response.move.sources) == BEFORE.addresses
