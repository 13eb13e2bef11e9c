"""What servers and workers show to Prometheus and to probes during a real training."""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from pscommon.settings.values import SnapshotEvery
from psserver.server import Server
from psworker import Client, Job
from psworker.session import metrics as worker_metrics
from tests.support.cluster import Cluster
from tests.support.metrics_scrape import Metrics, get
from tests.support.ports import free_ports
from tests.support.standbys import RunningStandby
from tests.support.workers import (
    ONES,
    VERSIONS,
    connected,
    count,
    counter,
    snapshots,
    status,
    together,
    train,
    until,
)

Make = Callable[..., Cluster]
LOOPBACK = "127.0.0.1:0"


def scrape(server: Server) -> Metrics:
    return Metrics(server.monitor.address)


def test_metrics_show_the_numbers_of_a_training(cluster: Make, tmp_path: Path) -> None:
    began = time.time()
    servers = cluster(
        2,
        min_workers=2,
        data_dir=tmp_path,
        snapshot_every=SnapshotEvery(steps=5),
        metrics_bind=LOOPBACK,
        job="otter",
    )
    train(servers.address)
    until(lambda: snapshots(servers.address), "a snapshot")
    with connected(servers.address, observe=True) as observer:
        observer.pull()
        plan = observer.plan

    for shard, server in enumerate(servers.servers):
        seen, mine = scrape(server), {"shard": str(shard)}
        assert seen("ps_version", **mine) == VERSIONS
        assert seen("ps_pushes_total", outcome="applied", **mine) == 2 * VERSIONS
        for outcome in ("duplicate", "stale", "rejected"):
            assert seen("ps_pushes_total", outcome=outcome, **mine) == 0
        assert seen("ps_staleness_versions_count", **mine) == 2 * VERSIONS
        assert seen("ps_staleness_versions_sum", **mine) == 0  # sync has no staleness
        assert seen("ps_barrier_wait_seconds_count", **mine) == 2 * VERSIONS
        assert seen("ps_push_apply_seconds_count", **mine) == VERSIONS
        assert seen("ps_apply_pushes_sum", **mine) == 2 * VERSIONS
        assert seen("ps_bytes_received_total", **mine) == (1 + 2 * VERSIONS) * plan.shard_nbytes(
            shard
        )
        assert seen("ps_bytes_sent_total", **mine) > 0
        assert seen("ps_parameter_bytes", **mine) == plan.shard_nbytes(shard) > 0
        assert seen("ps_rpc_requests_total", method="Exchange", code="OK", **mine) > 2 * VERSIONS
        assert seen("ps_rpc_duration_seconds_count", method="Exchange", **mine) > 2 * VERSIONS
        assert began <= seen("ps_snapshot_last_success_timestamp_seconds", **mine) <= time.time()
        assert seen("ps_snapshot_duration_seconds_count", **mine) >= 1
        # with Adam's moments
        assert seen("ps_snapshot_bytes", **mine) > 2 * plan.shard_nbytes(shard)
        assert seen("ps_snapshot_failures_total", **mine) == 0
        (info,) = seen.labels("ps_shard_info")
        assert info == {"shard": str(shard), "shards": "2", "job": "otter", "policy": "sync"}
        assert {"ps_build_info", "process_resident_memory_bytes"} <= seen.names
    # 80 inputs of 6 to 16 to 3 with biases, BatchNorm's two and its statistics, the count of
    # batches
    assert (
        sum(scrape(server)("ps_parameters") for server in servers.servers)
        == 6 * 16 + 16 + 4 * 16 + 1 + 16 * 3 + 3
    )


def test_every_shard_shows_the_current_policy(cluster: Make) -> None:
    servers = cluster(2, metrics_bind=LOOPBACK).servers
    shown = lambda: [scrape(server).labels("ps_shard_info")[0]["policy"] for server in servers]  # noqa: E731
    assert shown() == ["sync", "sync"]

    servers[0].service.set_policy("async", None, None)

    until(lambda: shown() == ["async", "async"], "the new policy on both shards")


def test_workers_are_shown_by_state_during_and_after_training(cluster: Make) -> None:
    servers = cluster(1, min_workers=2, metrics_bind=LOOPBACK)
    address, leader = servers.address, servers.servers[0]
    with counter(address, rank=0) as first, counter(address, rank=1) as second:
        together(lambda: count(first, 3), lambda: count(second, 3))
        until(lambda: in_state(leader, "active") == 2, "two active workers")
        for client in (first, second):
            mine = {"worker": str(client.worker)}
            until(
                lambda mine=mine: scrape(leader)("ps_worker_clock", **mine) == 3, "its three steps"
            )
    until(lambda: in_state(leader, "left") == 2, "two workers that have left")

    assert in_state(leader, "active") == 0
    assert scrape(leader).labels("ps_worker_clock") == []


def test_the_status_shows_where_the_time_of_a_worker_went_and_its_staleness(cluster: Make) -> None:
    address = cluster(1, policy="async", lease=1.0).address
    with counter(address, rank=0) as first, counter(address, rank=1) as second:
        first.pull()
        count(second, 3)
        count(first)
        until(lambda: [row["steps"] for row in status(address)["workers"]] == [1, 3], "their steps")
        workers = status(address)["workers"]
        until(lambda: phases_of(first, address) == phases_of(first), "the last heartbeat")

    assert [row["staleness"] for row in workers] == [3, 2]
    assert phases_of(second)["push"] > 0


def phases_of(client: Client, address: str = "") -> dict[str, float]:
    """Return a client's seconds by phase, as the status shows them if there is an address."""
    rows = status(address)["workers"] if address else []
    shown = [row["phase_seconds"] for row in rows if row["worker"] == client.worker]
    own = {phase: round(seconds, 3) for phase, seconds in client._stats.total.items()}
    return shown[0] if address else own


def in_state(server: Server, state: str) -> float:
    """Return the workers in a state; none is counted before the first tick."""
    seen = scrape(server)
    return seen("ps_workers", state=state) if "ps_workers" in seen.names else 0.0


def test_pushes_are_counted_by_outcome(cluster: Make) -> None:
    servers = cluster(1, policy="async", max_staleness=0, metrics_bind=LOOPBACK)
    with counter(servers.address) as quick, counter(servers.address) as slow:
        quick.pull()
        slow.pull()
        assert quick.push(ONES).status == "applied"
        assert slow.push(ONES).status == "stale"
        assert slow.push({"a": np.full((3, 40), np.nan, np.float32)}).status == "rejected"

    seen = scrape(servers.servers[0])
    outcomes = {
        outcome: seen("ps_pushes_total", outcome=outcome)
        for outcome in ("applied", "stale", "rejected")
    }
    assert outcomes == {"applied": 1, "stale": 1, "rejected": 1}


def test_staleness_is_shown_under_async(cluster: Make) -> None:
    servers = cluster(2, policy="async", metrics_bind=LOOPBACK)
    with counter(servers.address) as quick, counter(servers.address) as slow:
        slow.pull()
        count(quick, 3)
        count(slow)

    for server in servers.servers:
        seen = scrape(server)
        assert seen("ps_staleness_versions_count") == 4
        assert seen("ps_staleness_versions_sum") >= 3  # the staleness of the slow push


@pytest.mark.parametrize(
    ("error", "body", "reason"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "No space left on device", "ENOSPC"),
        # the coordinator does not wait for a part that will not come
        (MemoryError(), "a bug: MemoryError()", "other"),
    ],
)
def test_a_failed_snapshot_is_counted_by_cause_and_training_continues(
    cluster: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    body: str,
    reason: str,
) -> None:
    def fails(*_: object) -> str:
        raise error

    servers = cluster(
        1, data_dir=tmp_path, snapshot_every=SnapshotEvery(steps=2), metrics_bind=LOOPBACK
    )
    monkeypatch.setattr("pscommon.snapshot.atomic_files.write_tensors", fails)
    with counter(servers.address) as client:
        count(client, 3)
        until(lambda: status(servers.address)["snapshot_problem"], "a failure that is said")
        count(client)

    assert body in status(servers.address)["snapshot_problem"]
    seen = scrape(servers.servers[0])
    assert seen("ps_snapshot_failures_total", reason=reason) >= 1
    assert seen("ps_snapshot_last_success_timestamp_seconds") == 0


@pytest.mark.parametrize("durability", ["snapshot", "log"])
def test_the_age_of_a_snapshot_survives_a_restart(
    cluster: Make, tmp_path: Path, durability: str
) -> None:
    settings = {"data_dir": tmp_path, "durability": durability, "metrics_bind": LOOPBACK}
    first = cluster(2, **settings)
    with counter(first.address) as client:
        count(client)
    first.stop()
    written = time.time()
    again = cluster(2, **settings)
    until(lambda: status(again.address)["version"] == 1, "what was done before")

    for server in again.servers:
        until(lambda: scrape(server)("ps_version") == 1, "the weights")  # noqa: B023
        seen = scrape(server)
        assert written - 60 < seen("ps_snapshot_last_success_timestamp_seconds") <= written
        assert seen("ps_snapshot_bytes") > 0


def test_a_clock_that_is_set_back_makes_no_snapshot_younger_than_now(
    cluster: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = cluster(data_dir=tmp_path, snapshot_every=SnapshotEvery(steps=1))
    with counter(servers.address) as client:
        client.push(ONES)
        until(lambda: status(servers.address)["snapshots"], "a snapshot")
        earlier = Mock(wraps=time, time=lambda: time.time() - 3600)
        monkeypatch.setattr("psserver.coordinator.status.time", earlier)
        monkeypatch.setattr("psserver.durability.snapshots.time", earlier)
        found = status(servers.address)

    assert found["snapshot_age_seconds"] == 0
    assert {row["seconds"] for row in found["snapshots"]} == {0}


def test_probes_show_a_live_server_and_the_missing_weights(cluster: Make) -> None:
    """Alive from the start; ready once there are weights to train on."""
    servers = cluster(2, metrics_bind=LOOPBACK)
    leader, other = (server.monitor.address for server in servers.servers)
    assert get(leader, "/livez") == get(other, "/livez") == (200, "alive\n")
    until(
        lambda: "a worker to register a model" in get(leader, "/readyz").text,
        "all servers are there",
    )
    assert get(leader, "/readyz") == (503, "waiting for a worker to register a model\n")
    assert get(other, "/readyz") == (503, "no weights yet\n")

    with counter(servers.address) as client:
        count(client)

        assert get(leader, "/readyz") == get(other, "/readyz") == (200, "version 1\n")
    assert get(leader, "/livez").status == 200


def test_a_server_is_not_ready_while_a_shard_is_missing(cluster: Make) -> None:
    servers = cluster(2, metrics_bind=LOOPBACK)
    leader = servers.servers[0].monitor.address
    with counter(servers.address) as client:
        count(client)

        servers.servers.pop().close()

        until(lambda: get(leader, "/readyz").status == 503, "a server that is not ready")
        assert "shard 1 of 2 to connect" in get(leader, "/readyz").text
        assert get(leader, "/livez").status == 200  # a restart would not help


def test_a_standby_is_ready_once_it_could_take_over(cluster: Make) -> None:
    """It shows its position, and nothing that would count as its shard's."""
    server = cluster(metrics_bind=LOOPBACK).servers[0]
    with counter(server.address) as client, RunningStandby(server) as following:
        address = following.standby.monitor.address
        assert get(address, "/livez").status == 200
        following.in_sync()
        count(client, 3)
        until(lambda: Metrics(address)("ps_standby_version", shard="0") == 3, "all updates")
        assert get(address, "/readyz") == (200, f"standby of {server.address}, version 3\n")
        assert {name for name in Metrics(address).names if name.startswith("ps_")} == {
            "ps_standby_version"
        }
    with pytest.raises(OSError, match="refused"):
        get(address, "/livez")


def test_an_empty_standby_is_not_ready(cluster: Make) -> None:
    unused_address = f"127.0.0.1:{free_ports(1)[0]}"
    with RunningStandby(
        cluster(metrics_bind=LOOPBACK).servers[0], standby_of=unused_address
    ) as following:
        found = get(following.standby.monitor.address, "/readyz")
        assert found.status == 503
        assert unused_address in found.text  # with the reason after the first failed attempt


def test_a_worker_counts_its_steps_and_their_phases(cluster: Make) -> None:
    address = cluster(1).address
    served = worker_metrics.serve(LOOPBACK)
    in_job = lambda: Metrics(served)("ps_worker_in_job")  # noqa: E731
    places = [in_job()]

    def scrape_now(job: Job) -> None:
        job.report(loss=0.25, accuracy=0.5)
        places.append(in_job())

    try:
        train(address, workers=1, each=scrape_now)
        seen = Metrics(served)
        places.append(in_job())
    finally:
        worker_metrics.close()

    assert places == [0, *[1] * VERSIONS, 0]
    assert seen("ps_worker_steps_total") == VERSIONS
    assert seen("ps_worker_samples_total") == 8 * VERSIONS
    assert seen("ps_worker_loss") == 0.25
    assert seen("ps_worker_reported", name="accuracy") == 0.5
    for phase in ("data", "compute", "push"):
        assert seen("ps_worker_phase_seconds_count", phase=phase) == VERSIONS
        assert seen("ps_worker_phase_seconds_sum", phase=phase) > 0
