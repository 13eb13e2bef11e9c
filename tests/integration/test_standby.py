"""A standby follows real servers: its state, when it counts as in sync, and what it refuses."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from pscommon.core.errors import MismatchError, PSError, UnreachableError
from pscommon.wire.endpoint import Endpoint, open_channel
from pscommon.wire.status import translated
from psproto.v1 import coordinator_pb2 as co
from psproto.v1 import standby_pb2 as pb
from psproto.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from psproto.v1.standby_pb2_grpc import StandbyServiceStub
from psserver.core.shard import replication
from psserver.parameters.frozen_shard import FrozenShard
from psserver.replication.lease_directory import LeaseDirectory
from psserver.replication.primary import CHECKSUM_EVERY_VERSIONS
from psworker import Client, OptimizerSpec
from psworker.connection.discovery import describe
from tests.support.cluster import Cluster
from tests.support.machine_time import machine_seconds
from tests.support.metrics_scrape import Metrics
from tests.support.ports import free_ports
from tests.support.reshards import pushing, reshard
from tests.support.standbys import RunningStandby, has_same_state, silent_standby, standby_state
from tests.support.workers import ONES, connected, count, counter, status, until

Make = Callable[..., Cluster]


def adam(address: str) -> Client:
    """Return an optimizer with state."""
    client = connected(address)
    zeros = {name: np.zeros_like(one) for name, one in ONES.items()}
    client.register(zeros, OptimizerSpec("adam", lr=0.1))
    return client


@pytest.mark.parametrize("early", [True, False], ids=["from the beginning", "in the middle"])
def test_a_standby_has_the_whole_state_of_its_primary(cluster: Make, early: bool) -> None:
    """Weights, optimizer state, outcomes; at shard 0 also the coordinator with the last lease."""
    server = cluster(policy="async").servers[0]
    with RunningStandby(server) as following, adam(server.address) as client:
        if early:
            following.in_sync()
        for _ in range(5):
            client.push(ONES)
        following.in_sync()
        for _ in range(5):
            client.push(ONES)

        until(lambda: has_same_state(following), "the same")
        coordinator = standby_state(following).coordinator
        assert server.service is not None
        assert coordinator is not None
        assert coordinator.job.as_json() == server.service._coordinator.job.as_json()
        assert standby_state(following).version == 10


def test_staged_pushes_are_replicated(cluster: Make) -> None:
    """While a round waits for another worker."""
    server = cluster(policy="sync", min_workers=2).servers[0]
    with counter(server.address, rank=0) as first, RunningStandby(server) as following:
        pushing = threading.Thread(target=count, args=(first,))
        pushing.start()
        until(lambda: len(server.engine.live.state.staged) == 1, "a push that waits")
        following.in_sync()
        until(lambda: has_same_state(following), "the same")
        assert len(standby_state(following).shard_state.staged) == 1
        with counter(server.address, rank=1) as second:
            count(second)
            pushing.join()
        until(
            lambda: has_same_state(following) and standby_state(following).version == 1,
            "the round, too",
        )


def test_each_shard_can_have_a_standby(cluster: Make) -> None:
    servers = cluster(2, policy="async")
    with RunningStandby(servers.servers[1]) as following, counter(servers.address) as client:
        following.in_sync()
        count(client, 3)
        until(lambda: has_same_state(following), "the same")
        until(
            lambda: status(servers.address)["servers"][1].get("standby_state") == "in sync",
            "in the status",
        )
        assert status(servers.address)["servers"][1]["standby"] == following.standby.address
        assert standby_state(following).coordinator is None


def test_a_rollback_is_followed(cluster: Make, tmp_path: Path) -> None:
    servers = cluster(policy="async", data_dir=tmp_path)
    server = servers.servers[0]
    with RunningStandby(server) as following, counter(server.address) as client:
        following.in_sync()
        count(client, 2)
        assert server.service is not None
        version = server.service.snapshot_scheduler.save(20)
        count(client, 3)
        server.service.snapshot_scheduler.restore(version, 20)
        until(
            lambda: standby_state(following).is_loaded and standby_state(following).version == 2,
            "the older version",
        )
        following.in_sync()
        assert has_same_state(following)


def test_a_standby_of_shard_0_knows_the_newest_snapshot(cluster: Make, tmp_path: Path) -> None:
    """Before any shard drops earlier log entries: a new primary tells them where to resume."""
    server = cluster(policy="async", data_dir=tmp_path, snapshot_keep=2).servers[0]
    assert server.service is not None
    with RunningStandby(server) as following, counter(server.address) as client:
        following.in_sync()
        for version in (1, 2, 3):
            count(client, 1)
            assert server.service.snapshot_scheduler.save(20.0) == version
            newest = standby_state(following).newest
            assert newest is not None
            assert newest.version == version
        until(lambda: server.snapshots.retained == [2, 3], "older ones to go")


def test_standbys_follow_a_reshard(cluster: Make) -> None:
    """Each loads again after the reshard, with its former flags; that of a removed server ends."""
    servers = cluster(2, policy="async")
    first, second = servers.servers
    with (
        RunningStandby(first) as of_first,
        RunningStandby(second) as of_second,
        pushing(servers.address, 1, "grpc") as pushers,
    ):
        for shards in (3, 2, 1):
            pushers[0].goes_on()
            reshard(servers, shards, policy="async")
            pushers[0].goes_on()
            of_first.in_sync()
            if shards > 1:
                of_second.in_sync()
                assert standby_state(of_second).shard_state.shards == shards
        assert second.ended.wait(10)
        second.close()  # its process would do this
        until(lambda: of_second.ended, "the end of the second standby")
        pushers[0].stop()
        until(lambda: has_same_state(of_first), "the same")
        coordinator = standby_state(of_first).coordinator
        assert coordinator is not None
        assert (coordinator.job.shards, standby_state(of_first).shard_state.shards) == (1, 1)
        facts = standby_state(of_first).hello.facts
        assert facts is not None
        assert facts.shard_count == {"shards": 1, "past": [2, 3], "changes": 3}


def test_a_checksum_mismatch_is_detected_and_the_state_loaded_again(
    cluster: Make, caplog: pytest.LogCaptureFixture
) -> None:
    server = cluster(policy="async", metrics_bind="127.0.0.1:0").servers[0]
    with RunningStandby(server) as following, counter(server.address) as client:
        following.in_sync()
        count(client, 3)
        until(lambda: has_same_state(following), "the same")
        wrong = standby_state(following)
        store = wrong.shard_state.store
        assert store is not None
        next(iter(store.tensors()))[1][0] += 1.0

        count(client, CHECKSUM_EVERY_VERSIONS - 3)

        until(lambda: standby_state(following) is not wrong, "another state")
        following.in_sync()
        assert has_same_state(following)
        assert Metrics(server.monitor.address)("ps_standby_divergences_total") == 1
        assert any(
            "differ from the primary's at version 100" in str(getattr(r, "problem", ""))
            for r in caplog.records
        )


def test_a_standby_ends_with_the_job(cluster: Make) -> None:
    servers = cluster()
    with RunningStandby(servers.servers[0]) as following:
        following.in_sync()
        servers.stop()
        until(lambda: following.ended, "the end of the standby")
        assert following.standby.failure is None


def test_a_standby_names_its_primary(cluster: Make) -> None:
    server = cluster().servers[0]
    with RunningStandby(server) as following:
        following.in_sync()
        with pytest.raises(PSError, match=server.address) as refused:
            describe(following.standby.address)
        assert refused.value.reason == "NOT_PRIMARY"


def test_an_empty_standby_does_not_wait_forever(cluster: Make) -> None:
    server = cluster().servers[0]
    with RunningStandby(
        server, standby_of=f"127.0.0.1:{free_ports(1)[0]}", join_timeout=0.5
    ) as following:
        until(lambda: following.ended, "its end")
        failure = following.standby.failure
        assert isinstance(failure, UnreachableError)
        assert failure.reason == "UNREACHABLE"


def test_settings_that_differ_from_the_primarys_are_refused_by_name(cluster: Make) -> None:
    server = cluster(policy="async").servers[0]
    with RunningStandby(server, policy="sync") as following:
        until(lambda: following.ended, "its end")
        failure = following.standby.failure
        assert isinstance(failure, MismatchError)
        assert failure.reason == "SHARD_MISMATCH"
        assert ": policy (" in str(failure)


def test_a_second_standby_is_refused(cluster: Make) -> None:
    server = cluster().servers[0]
    with RunningStandby(server) as first:
        first.in_sync()
        with RunningStandby(server) as second:
            until(lambda: second.standby._noticed_at, "a try")
            assert server.replicator.address == first.standby.address
            first.standby.stop("")
            until(lambda: server.replicator.address == second.standby.address, "the second one")


def test_a_standby_that_is_behind_is_not_promoted(cluster: Make) -> None:
    server = cluster().servers[0]
    with RunningStandby(server) as following:
        with (
            closing(open_channel(Endpoint(server.address))) as channel,
            pytest.raises(MismatchError) as refused,
            translated("the primary"),
        ):
            StandbyServiceStub(channel).StepDown(
                pb.StepDownRequest(instance="another standby"), timeout=5
            )
        assert refused.value.reason == "NOT_IN_SYNC"
        following.in_sync()
        with counter(server.address) as client:
            count(client)


def test_a_standby_that_cannot_load_gives_the_reason(cluster: Make) -> None:
    server = cluster(policy="async").servers[0]
    with counter(server.address) as client:
        count(client, 1)
        store = server.engine.live.store
        assert store is not None
        with server.engine.live.lock_weights(1):
            server.engine.live.state.frozen = FrozenShard(
                server.engine.live.machine.log_id, 1, 1, store
            )
        with RunningStandby(server) as following:
            until(lambda: "the job is being resharded" in following.standby.ready()[1], "a reason")
            with pytest.raises(MismatchError, match="the job is being resharded") as refused:
                following.standby.promote(1.0)
            assert refused.value.reason == "NOT_IN_SYNC"


def test_an_ending_standby_is_not_promoted_and_a_promoted_one_does_not_end(
    cluster: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its primary would end, too, and the shard would have no primary."""
    server, asked, answer = cluster().servers[0], threading.Event(), threading.Event()

    def agreed() -> str:
        asked.set()
        answer.wait(10)
        return ""

    with RunningStandby(server) as following, ThreadPoolExecutor(2) as pool:
        following.in_sync()
        monkeypatch.setattr(following.standby, "_ask_to_step_down", agreed)
        monkeypatch.setattr(following.standby._failover, "take_over", lambda: None)
        promoting = pool.submit(following.standby.promote, 1.0)
        asked.wait(10)
        stopping = pool.submit(following.standby.stop, "SIGTERM")
        with pytest.raises(TimeoutError):
            stopping.result(0.3)
        assert not following.standby.ended.is_set()
        answer.set()
        with pytest.raises(MismatchError):
            promoting.result(10)
        stopping.result(10)

        asked.clear()
        with pytest.raises(UnreachableError) as refused:
            following.standby.promote(1.0)
        assert refused.value.reason == "STOPPING"
        assert not asked.is_set()


def test_a_standby_stopped_while_it_connects_ends(
    cluster: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no connection yet to end; the new one would last until its primary drops it."""
    server = cluster().servers[0]
    monkeypatch.setattr(replication, "STANDBY_TIMEOUT_SECONDS", 60.0)
    following = RunningStandby(server)
    monkeypatch.setattr(
        following.standby, "_find_primary", lambda: following.standby.stop("SIGTERM")
    )
    with following:
        until(lambda: following.ended, "its end")


def test_a_standby_refused_by_the_lock_names_the_server_that_is_ahead(
    cluster: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = cluster().servers[0]
    with RunningStandby(server) as following:
        following.in_sync()
        monkeypatch.setattr(following.standby, "_ask_to_step_down", lambda: "no server answers")
        monkeypatch.setattr(following.standby._failover, "take_over", lambda: None)
        with pytest.raises(MismatchError, match=server.address) as refused:
            following.standby.promote(1.0)
        assert refused.value.reason == "NOT_IN_SYNC"


def test_the_lock_names_the_awaited_standby(cluster: Make, tmp_path: Path) -> None:
    server = cluster(failover_lock=tmp_path).servers[0]
    lease = LeaseDirectory(tmp_path, 0)

    def in_sync() -> str:
        tenure = lease.read()
        assert tenure is not None
        return tenure.in_sync

    assert in_sync() == ""
    with RunningStandby(server) as following:
        following.in_sync()
        assert in_sync() == following.standby.name
    until(lambda: in_sync() == "", "no standby in sync after the standby closes")
    with counter(server.address) as client:
        count(client)


def test_a_dying_standby_delays_pushes_only_briefly(cluster: Make) -> None:
    server = cluster(policy="async").servers[0]
    with counter(server.address) as client:
        with RunningStandby(server) as following:
            following.in_sync()
            count(client)
        began = time.monotonic()
        count(client)
        assert machine_seconds(began) < 3.0


def test_the_end_of_a_connection_blocks_no_other_while_shard_0_waits(
    cluster: Make,
) -> None:
    """gRPC reports the end in the thread that also receives from the standby."""
    server, ended = cluster(policy="async").servers[0], threading.Event()

    def words() -> Iterator[co.LinkShardRequest]:
        yield co.LinkShardRequest(
            format=3, shard=1, shards=2, address="nowhere:1", instance="candidate"
        )
        ended.wait()

    with (
        counter(server.address) as client,
        silent_standby(server) as speaking,
        closing(open_channel(Endpoint(server.address))) as channel,
    ):
        line = CoordinatorServiceStub(channel).LinkShard(words())
        next(line)
        pushing = threading.Thread(target=count, args=(client,))
        pushing.start()
        until(
            lambda: server.replicator.unacknowledged,
            "a record that the standby does not acknowledge",
        )
        line.cancel()

        for _ in range(20):
            assert describe(server.address, 1.0).shard == 0

        speaking.set()
        pushing.join(10)
        ended.set()
    assert server.replicator.term == 1
