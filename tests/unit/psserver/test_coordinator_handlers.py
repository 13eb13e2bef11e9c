"""What a shard receives over its connection to the coordinator."""

import math
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest

from psproto.v1 import coordinator_pb2 as pb
from psserver.coordinator.handlers import get_status, link_shard
from psserver.coordinator.shard_connections import ShardUpdate
from psserver.coordinator.shard_stream import MAX_SILENCE_SECONDS, ShardListener
from psserver.core.job.settings import GradientRules
from psserver.core.servers.catch_up import CatchUp
from psserver.core.servers.server_entry import DeliveryCursor, ServerEntry
from psserver.monitoring.tracing import Tracing
from psserver.process.worker_exits import WorkerExits

ADDRESSES, STANDBYS = ["s0:1", "s1:1"], ["", "b1:1"]


class ReshardingService:
    """Coordinator service whose reshard to one shard ends after the first update."""

    job, waiting_for, is_over, policy = "j", "", False, "ssp"
    config = SimpleNamespace(gradient_rules=GradientRules(), durability="log")

    def __init__(self) -> None:
        self.server = ServerEntry(1, "s1:1", connected=True, connection=1)
        self.directory: Any = [ServerEntry(0, term=3)]
        self.stopped, self.worker_exits = threading.Event(), WorkerExits()
        self.reshard_requests = self.report = self.disconnect = self.check_job = Mock()
        self.shard_connections, self.executor = self, MagicMock()
        self.worker_keys = SimpleNamespace(job_key=b"")
        self.tracing = Tracing()

    def connect(self, *args: object) -> tuple[ServerEntry, int]:
        return self.server, self.server.connection

    def next_update(self, server: ServerEntry, cursor: DeliveryCursor) -> ShardUpdate:
        servers = SimpleNamespace(
            shards=1, addresses=["s0:1"], standbys=[""], reshard_count=1, term=3
        )
        reshard = pb.Move(index=7, sources=ADDRESSES)
        self.directory = type(
            "After", (), {**vars(servers), "__getitem__": lambda servers, shard: servers}
        )()
        self.reshard_requests.describe.return_value = None
        return ShardUpdate(
            DeliveryCursor(5, 9, CatchUp.RECOVER),
            0,
            None,
            CatchUp.RECOVER,
            None,
            [],
            [],
            2,
            ADDRESSES,
            STANDBYS,
            0,
            reshard,
        )


def first_response(service: Any, request: pb.LinkShardRequest) -> pb.LinkShardResponse:
    ended = threading.Event()

    def requests() -> Iterator[pb.LinkShardRequest]:
        yield request
        ended.wait()

    response = next(link_shard(service, requests(), Mock()))
    ended.set()
    return response


def test_the_status_is_strict_json(monkeypatch: pytest.MonkeyPatch) -> None:
    status = {"metrics": {"loss": math.nan, "accuracy": 0.5}}
    monkeypatch.setattr("psserver.coordinator.handlers.describe", lambda service: status)
    answer = get_status(Mock(), pb.GetStatusRequest())

    assert answer.status_json == '{"metrics": {"loss": null, "accuracy": 0.5}}'


def test_one_response_to_a_shard_describes_one_state() -> None:
    """A catch-up action from before the end of a reshard must not come with the new servers."""
    request = pb.LinkShardRequest(format=3, shard=1, shards=2, address="s1:1", instance="i")
    response = first_response(ReshardingService(), request)

    assert (response.recover, response.shards, response.layout, response.policy) == (
        True,
        2,
        0,
        "ssp",
    )
    assert response.durable
    assert (list(response.addresses), list(response.standbys)) == (ADDRESSES, STANDBYS)
    assert list(response.move.sources) == ADDRESSES


def test_an_unlinked_shard_learns_the_possible_addresses_of_shard_0() -> None:
    """Its standby reloads everything when the model is resharded, and may be absent just then."""
    service: Any = ReshardingService()
    service.next_update = lambda server, cursor: None
    service.directory = MagicMock(standbys=["b0:1", ""])
    service.directory.__getitem__.return_value = ServerEntry(0, term=3)

    response = first_response(
        service, pb.LinkShardRequest(format=3, shard=2, shards=3, address="s2:1", instance="i")
    )

    assert (list(response.addresses), list(response.standbys), response.term) == (
        [],
        ["b0:1", ""],
        3,
    )
    assert response.durable


def test_silence_counts_only_while_the_coordinator_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update of a large model that follows a report may take longer than a shard may be
    silent.
    """
    clock, found = SimpleNamespace(now=10.0), []
    monkeypatch.setattr(
        "psserver.coordinator.shard_stream.time", SimpleNamespace(monotonic=lambda: clock.now)
    )
    service: Any = Mock()
    listener = ShardListener(service, ServerEntry(1), 1, iter([]), Mock())

    def update(*args: object) -> None:
        clock.now += 2 * MAX_SILENCE_SECONDS
        found.append(listener.silent)

    service.shard_connections.report = update
    for _ in range(2):
        listener.handle(pb.LinkShardRequest(format=3, report=pb.Report()))
        found.append(listener.silent)
    clock.now += MAX_SILENCE_SECONDS

    assert found == [0, 0, 0, 0]
    assert listener.silent == MAX_SILENCE_SECONDS


@pytest.mark.parametrize("connection", [2, 1])
def test_only_the_current_process_of_a_shard_describes_it(connection: int) -> None:
    """Else the status would show the standby of a former primary as that of the present one."""
    server = ServerEntry(1, connection=2, standby="b1:1")
    sent = pb.LinkShardRequest(format=3, instance="i", standby="old:1", stats_json='{"version": 7}')

    ShardListener(Mock(), server, connection, iter([]), Mock()).handle(sent)

    found = server.standby, server.stats
    assert found == (("old:1", {"version": 7}) if connection == 2 else ("b1:1", {}))
