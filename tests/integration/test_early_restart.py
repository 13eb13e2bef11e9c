"""Servers that are killed before any snapshot, restart at another address, or are found
too early.
"""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from pscommon.core.errors import UnreachableError
from psproto.v1 import parameter_server_pb2 as ps
from psserver.process.config import ServerConfig
from psserver.server import Server
from psworker.transport.exchange_calls import AnswerReceiver, Cancellation
from psworker.transport.grpc_transport import GrpcTransport
from tests.support.cluster import Cluster
from tests.support.ports import free_port
from tests.support.workers import count, counted, counter, status, weights_of

SECONDS = 10.0


def test_updates_before_the_first_snapshot_survive_each_restart(
    cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    """Also with workers whose numbers come from an earlier start of the servers."""
    for start in range(3):
        servers = cluster(2, data_dir=tmp_path, durability="log", policy="async", lease=60.0)
        with counter(servers.address) as client:
            assert counted(client.pull()) == 5 * start
            count(client, 5)
        assert counted(weights_of(servers.address)) == 5 * (start + 1)
        assert status(servers.address)["snapshots"] == []
        servers.close()


def exchange(lane: GrpcTransport) -> None:
    header = ps.PushPullHeader(job="otter", pull=ps.PULL_STEP)
    lane.exchange(1, header, [], AnswerReceiver(lambda result: []), SECONDS, Cancellation())


def attach(lane: GrpcTransport) -> None:
    header = ps.PushPullHeader(job="otter", worker=1)
    lane.offer_memory(1, header, lambda: -1, SECONDS)


@pytest.mark.parametrize("call", [exchange, attach])
def test_a_restarted_shard_that_does_not_know_its_job_yet_asks_for_a_retry(
    call: Callable[[GrpcTransport], None],
) -> None:
    """A worker may be faster than the coordinator, and must not take it for another job's shard."""
    server = Server(
        ServerConfig(shard=1, shards=2, bind="127.0.0.1:0", join=f"127.0.0.1:{free_port()}")
    )
    server.start()
    with closing(server), closing(GrpcTransport(["", server.address], lanes="auto")) as lane:
        with pytest.raises(UnreachableError) as caught:
            call(lane)

        assert caught.value.reason == "NOT_READY"


def test_a_shard_restarted_at_another_address_is_found_by_its_workers(
    cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    settings = {"data_dir": tmp_path, "durability": "log"}
    servers = cluster(2, **settings)
    with counter(servers.address, connect_timeout=20.0) as client:
        count(client, 3)
        before = servers.servers.pop()
        before.close()
        again = servers.add(1, 2, bind=f"127.0.0.1:{free_port()}", **settings)
        assert again.address != before.address

        count(client, 2)
        assert counted(client.pull()) == 5
        assert client.addresses == (servers.address, again.address)
