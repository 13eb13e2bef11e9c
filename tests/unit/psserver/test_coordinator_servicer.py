"""What a shard is told over its line to the coordinator."""

import math
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest

from psproto.v1 import coordinator_pb2 as pb
from psserver.coordinator.server_registry import (
    DeliveryCursor,
    RegistryView,
    ServerEntry,
    ShardUpdate,
)
from psserver.coordinator.servicer import SILENCE, ControlPlaneServicer, _ShardListener
from psserver.core.job.catch_up import CatchUp
from psserver.core.job.settings import GradientRules
from psserver.process.worker_exits import WorkerExits

BEFORE = RegistryView(2, ["s0:1", "s1:1"], ["", "b1:1"], 0)


class HubThatMoves:
    """Once it has said what is new, a move to one shard ends."""

    job, waiting_for, over, policy = "j", "", False, "ssp"
    config = SimpleNamespace(fitness=GradientRules(), durability="log")

    def __init__(self) -> None:
        self.server = ServerEntry(1, "s1:1", connected=True, line=1)
        self.fleet: Any = [ServerEntry(0, term=3)]
        self.stopped, self.exits = threading.Event(), WorkerExits()
        self.reshards = self.report = self.shard_down = self.check_job = Mock()

    def shard_up(self, *args: object) -> tuple[ServerEntry, int]:
        return self.server, self.server.line

    def news(self, server: ServerEntry, told: DeliveryCursor) -> ShardUpdate:
        fleet = SimpleNamespace(shards=1, addresses=["s0:1"], standbys=[""], layout=1, term=3)
        move = pb.Move(index=7, sources=BEFORE.addresses)
        self.fleet = type("After", (), {**vars(fleet), "__getitem__": lambda fleet, shard: fleet})()
        self.reshards.move.return_value = None
        return ShardUpdate(
            DeliveryCursor(5, 9, CatchUp.RECOVER),
            0,
            None,
            CatchUp.RECOVER,
            None,
            [],
            [],
            BEFORE,
            move,
        )


def first_response(hub: Any, request: pb.LinkShardRequest) -> pb.LinkShardResponse:
    over = threading.Event()

    def requests() -> Iterator[pb.LinkShardRequest]:
        yield request
        over.wait()

    response: pb.LinkShardResponse = next(ControlPlaneServicer(hub).LinkShard(requests(), Mock()))
    over.set()
    return response


def test_the_status_is_json_for_every_parser() -> None:
    hub = Mock()
    hub.status.return_value = {"metrics": {"loss": math.nan, "accuracy": 0.5}}
    answer = ControlPlaneServicer(hub).GetStatus(pb.GetStatusRequest(), None)

    assert answer.status_json == '{"metrics": {"loss": null, "accuracy": 0.5}}'


def test_all_that_a_shard_is_told_at_a_time_is_of_one_moment() -> None:
    """A way to follow that was found before a move ended, and the servers of after it, would
    lead astray.
    """
    request = pb.LinkShardRequest(shard=1, shards=2, address="s1:1", instance="i")
    response = first_response(HubThatMoves(), request)

    assert (response.recover, response.shards, response.layout, response.policy) == (
        True,
        2,
        0,
        "ssp",
    )
    assert response.durable
    assert (list(response.addresses), list(response.standbys)) == (
        BEFORE.addresses,
        BEFORE.standbys,
    )
    assert list(response.move.sources) == BEFORE.addresses


def test_who_is_not_in_the_job_yet_hears_where_shard_0_may_be_later() -> None:
    """Its standby has to load everything anew when the model moves, and is not there just then."""
    hub: Any = HubThatMoves()
    hub.news = lambda server, told: None
    hub.fleet = MagicMock(standbys=["b0:1", ""])
    hub.fleet.__getitem__.return_value = ServerEntry(0, term=3)

    response = first_response(
        hub, pb.LinkShardRequest(shard=2, shards=3, address="s2:1", instance="i")
    )

    assert (list(response.addresses), list(response.standbys), response.term) == (
        [],
        ["b0:1", ""],
        3,
    )
    assert response.durable


def test_silence_counts_only_while_somebody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a report makes possible, an update of a large model, may take longer than a shard may
    be silent.
    """
    clock, found = SimpleNamespace(now=10.0), []
    monkeypatch.setattr(
        "psserver.coordinator.servicer.time", SimpleNamespace(monotonic=lambda: clock.now)
    )
    hub: Any = Mock()
    listener = _ShardListener(hub, ServerEntry(1), 1, iter([]))

    def update(*args: object) -> None:
        clock.now += 2 * SILENCE
        found.append(listener.silent)

    hub.report = update
    for _ in range(2):
        listener.hear(pb.LinkShardRequest(report=pb.Report()))
        found.append(listener.silent)
    clock.now += SILENCE

    assert found == [0, 0, 0, 0]
    assert listener.silent == SILENCE
