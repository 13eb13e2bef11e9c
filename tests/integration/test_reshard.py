"""Reshards under load: no push is lost or repeated, and workers only see a pause."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pscommon.core.errors import LayoutError, UnreachableError
from pscommon.wire.endpoint import Endpoint, open_channel
from pscommon.wire.frames import ExchangeStub, encode_header
from pscommon.wire.status import translated
from psproto.v1 import parameter_server_pb2 as ps
from psserver.coordinator.resharding import ReshardRequests
from psserver.coordinator.status import describe
from psserver.shard.live_state import LiveShardState
from psworker import Client
from psworker.ctl.cli import main
from psworker.transport.exchange_calls import AnswerReceiver, Cancellation, ExchangeAnswer
from psworker.transport.grpc_transport import GrpcTransport
from tests.support.cluster import Cluster
from tests.support.lanes import each_lane, each_network_lane
from tests.support.metrics_scrape import Metrics
from tests.support.ports import free_port
from tests.support.reshards import EACH, ONES, ZEROS, pushing, reshard, weights
from tests.support.wire_calls import key_of
from tests.support.workers import connected, until

Make = Callable[..., Cluster]


class LosesShardLane(GrpcTransport):
    """Delivers a push to shard 1 and loses its answer."""

    def exchange(self, shard: int, header: ps.PushPullHeader, *args: Any) -> ExchangeAnswer:
        answer = super().exchange(shard, header, *args)
        if shard == 1 and header.seq:
            self._servers._set_address(1, f"127.0.0.1:{free_port()}")
            raise UnreachableError("shard 1 does not answer", "UNREACHABLE")
        return answer


@pytest.mark.every(5)
@each_lane
@pytest.mark.parametrize("policy", ["sync", "async"])
@pytest.mark.parametrize("durability", ["", "snapshot", "log"])
def test_each_push_counts_once_during_reshards(
    cluster: Make, tmp_path: Path, lanes: str, policy: str, durability: str
) -> None:
    data = {"data_dir": tmp_path, "durability": durability} if durability else {}
    settings = {"policy": policy, "min_workers": 2, **data}
    servers = cluster(2, **settings)
    with pushing(servers.address, 2, lanes) as pushers:
        for shards in (3, 1):
            for pusher in pushers:
                pusher.goes_on()
            assert reshard(servers, shards, **settings).seconds > 0
        for pusher in pushers:
            pusher.goes_on()
    for ended_server in servers.servers[1:]:
        assert ended_server.ended.wait(10)
        assert ended_server.failure is None

    counted = sum(pusher.counted for pusher in pushers)
    status = describe(servers.servers[0].service)  # type: ignore[arg-type]
    assert (status["steps"], len(status["servers"]), status["moving_to"]) == (counted, 1, None)
    # under sync an update is the mean of a round
    assert policy == "sync" or status["version"] == counted
    found = weights(servers.address)
    assert {*found["w"], *found["b"]} == {-status["version"]}


def test_a_report_of_a_removed_server_causes_no_rollback(
    cluster: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its report may be on the way while the reshard ends."""
    servers = cluster(2, policy="async")
    (leader, leaver), service = servers.servers, servers.servers[0].service
    assert service is not None
    with Client(servers.address) as client, monkeypatch.context() as patch:
        client.register(ZEROS, EACH)
        client.push(ONES)
        left = service.directory[1]
        # the removed server is not dismissed
        patch.setattr(ReshardRequests, "dismiss", lambda reshards: None)
        reshard(servers, 1, policy="async")
        service.shard_connections.report(leaver.engine.make_report(), left, left.connection)
    assert (leader.failure, service.version) == (None, 1)


def test_ps_ctl_names_the_servers_to_start_and_the_cost(
    cluster: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"policy": "async", "metrics_bind": "127.0.0.1:0"}
    servers = cluster(1, **settings)
    with registered(servers) as client:
        client.push(ONES)
        servers.add(1, 3, **settings)
        until(lambda: client.status()["candidates"], "a candidate")
        assert [row["shard"] for row in client.status()["candidates"]] == [1]
        assert main(["--ps", servers.address, "reshard", "--servers", "3"]) == 2
        assert f"ps-server --shard 2/3 --join {servers.address}" in capsys.readouterr().err
        assert main(["--ps", servers.address, "reshard", "--servers", "1"]) == 2
        capsys.readouterr()

        servers.add(2, 3, **settings)
        until(lambda: len(client.status()["candidates"]) == 2, "two candidates")
        assert main(["--ps", servers.address, "reshard", "--servers", "3", "--output", "json"]) == 0
        messages = json.loads(capsys.readouterr().out)
        assert (messages["servers"], messages["pause_seconds"] > 0) == (3, True)
        assert 0 < messages["nbytes"] < client.plan.nbytes

        client.push(ONES)
        status = client.status()
        assert (len(status["servers"]), status["candidates"], status["state"]) == (3, [], "running")
        for server in servers.servers:
            (labels,) = Metrics(server.monitor.address).labels("ps_shard_info")
            assert labels["shards"] == "3"


@pytest.fixture
def reshardable_job(cluster: Make) -> Cluster:
    """Two servers, and a job whose weights are zeros."""
    return cluster(2, policy="async")


@contextmanager
def registered(servers: Cluster, lanes: str = "grpc") -> Iterator[Client]:
    with Client(servers.address, lanes=lanes) as client:  # type: ignore[arg-type]
        client.register(ZEROS, EACH)
        yield client


@pytest.mark.every(4)
@each_lane
@pytest.mark.parametrize("when", ["before anything is sent", "half sent", "when all has gone"])
def test_a_push_in_pieces_counts_once_when_servers_join_during_it(
    reshardable_job: Cluster, lanes: str, when: str
) -> None:
    with registered(reshardable_job, lanes) as client:
        for shards in (3, 1):
            client.pull()
            buffer, nbytes = (
                np.frombuffer(client.model.flat_buffers()[0], np.uint8),
                client.plan.nbytes,
            )
            buffer[:] = buffer_of_ones(client)
            flow = client.model.begin()
            if when != "before anything is sent":
                flow.send(0, nbytes // 2 if when == "half sent" else nbytes)
            reshard(reshardable_job, shards, policy="async")
            result = flow.finish()
            flow.wait(0, nbytes)
            flow.close()
            assert result.status == "applied"
            assert client.plan.shards == shards
        assert {*client.weights["w"], *client.weights["b"]} == {-2}


def buffer_of_ones(client: Client) -> np.ndarray:
    """Return what a push of ones sends."""
    buffer = np.zeros(client.plan.nbytes, np.uint8)
    for index, tensor in enumerate(client.plan.spec.tensors):
        start, stop = client.plan.extent(index)
        buffer[start:stop] = ONES[tensor.name].view(np.uint8)
    return buffer


def test_a_worker_that_discovered_the_old_servers_can_register(reshardable_job: Cluster) -> None:
    with Client(reshardable_job.address) as late, registered(reshardable_job) as client:
        client.push(ONES)
        reshard(reshardable_job, 3, policy="async")
        late.register(ZEROS, EACH)
        assert late.push_pull(ONES).version == 2
        client.rejoin()
        assert set(client.pull()["w"]) == {-2}


def test_a_request_with_another_number_of_shards_is_refused(reshardable_job: Cluster) -> None:
    with registered(reshardable_job) as client:
        header = ps.PushPullHeader(
            job=client.job, worker=client.worker, seq=1, has_data=True, samples=1, shards=3
        )
        with (
            open_channel(Endpoint(reshardable_job.address)) as channel,
            pytest.raises(LayoutError),
            translated("it"),
        ):
            ExchangeStub(channel).once(encode_header(header), timeout=5, key=key_of(client))


def test_a_server_of_before_the_reshard_ends(reshardable_job: Cluster) -> None:
    """Its connection was cut when the others were informed."""
    with registered(reshardable_job):
        leaver = reshardable_job.servers[1]
        reshard(reshardable_job, 1)
        assert leaver.ended.wait(5)
        assert leaver.failure is None
        assert not reshardable_job.servers[0].service.directory.candidates  # type: ignore[union-attr]


def test_a_push_answered_by_all_but_a_removed_server_has_counted(cluster: Make) -> None:
    """No exchange of it learns of the reshard; a heartbeat does."""
    servers = cluster(2)
    with (
        Client(lane=LosesShardLane(servers.addresses.split(","))) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        client.register(ZEROS, EACH)
        pushed = pool.submit(client.push_pull, ONES)
        until(lambda: servers.servers[0].service.version == 1, "an update")  # type: ignore[union-attr]

        reshard(servers, 1)

        assert pushed.result(20).status == "applied"
        assert client.push_pull(ONES).version == 2


@each_network_lane
def test_a_push_that_waits_while_the_partition_changes_is_sent_to_the_new_one(
    cluster: Make, monkeypatch: pytest.MonkeyPatch, lanes: str
) -> None:
    """It fits the number of shards when it arrives, and no more when there is memory for it."""
    with connected(cluster(1).address, lanes=lanes) as client:
        client.register(ZEROS, EACH)
        monkeypatch.setattr(LiveShardState, "check_shard_count", lambda live, shards: None)
        connection = client._connection
        header = ps.PushPullHeader(
            job=connection.membership.job,
            worker=connection.membership.worker,
            seq=1,
            has_data=True,
            samples=1,
            shards=2,
        )
        receiver = AnswerReceiver(lambda result: [])

        with pytest.raises(LayoutError, match="1 shards, not 2"):
            connection.transport.exchange(
                0, header, [memoryview(bytes(400))], receiver, 10.0, Cancellation(is_alone=True)
            )
