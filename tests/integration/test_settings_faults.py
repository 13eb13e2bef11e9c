"""Each setting of ps-server for failures changes what a server does."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path

import numpy as np
import pytest

from pscommon.core.data_loop import LoopSpec
from pscommon.core.errors import PSError, QuarantinedError, TooFewWorkersError
from pscommon.core.log_entries import BatchKey
from pscommon.wal import segment as record_segment
from pscommon.wire import messages as codec
from pscommon.wire.endpoint import Endpoint, open_channel
from psproto.v1 import coordinator_pb2 as co
from psproto.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from psserver.replication.lease_directory import LeaseDirectory
from psworker import Client
from tests.support.events import events
from tests.support.metrics_scrape import Metrics
from tests.support.settings_coverage import server_setting
from tests.support.settings_server import Serve, configured
from tests.support.standbys import RunningStandby, silent_standby
from tests.support.wire_calls import sent_by
from tests.support.workers import ONES, OUTLIVED, count, counted, counter, status, until

NANS = {name: np.full_like(one, np.nan) for name, one in ONES.items()}
NORM = float(np.sqrt(sum(one.size for one in ONES.values())))
"""Of a push of ones."""


# ---- lost workers --------------------------------------------------------------------------------


@server_setting("on_worker_loss")
@pytest.mark.parametrize(
    ("mode", "expected", "seconds"), [("shrink", False, 0.0), ("wait:1.5", True, 1.5)]
)
def test_on_worker_loss_decides_when_a_round_continues(
    serve: Serve, caplog: pytest.LogCaptureFixture, mode: str, expected: bool, seconds: float
) -> None:
    address = serve("--min-workers", 2, "--lease", f"{OUTLIVED}s", "--on-worker-loss", mode).address
    with counter(address, rank=0) as client:
        began = time.monotonic()
        with falls_silent(client):
            count(client)

        assert time.monotonic() - began >= OUTLIVED + seconds
    until(lambda: "worker_lost" in events(caplog), "a line about it")
    assert ("worker_silent" in events(caplog)) is expected


def test_on_worker_loss_abort_ends_the_job(serve: Serve) -> None:
    server = serve("--min-workers", 2, "--lease", f"{OUTLIVED}s", "--on-worker-loss", "abort")
    with counter(server.address, rank=0) as client, falls_silent(client):
        with pytest.raises(TooFewWorkersError, match="rank 1, "):
            until(lambda: count(client), "the word of it")
        assert server.ended.wait(10)

    assert server.failure is not None
    assert server.failure.exit_code == 21
    assert "(rank 1, " in str(server.failure)


@contextmanager
def falls_silent(client: Client) -> Iterator[None]:
    """Register a second worker, of rank 1, that stays silent."""
    with closing(open_channel(Endpoint(client.addresses[0]))) as channel:
        stub = CoordinatorServiceStub(channel)
        joined = stub.Join(co.JoinRequest(format=3, rank=1), timeout=20)
        model = codec.model_to_proto(client.plan.spec)
        register = co.RegisterRequest(worker=joined.worker, model=model)
        stub.Register(register, timeout=20, metadata=sent_by(joined.key))
        yield


# ---- slow workers --------------------------------------------------------------------------------


@server_setting("backup_workers")
@pytest.mark.parametrize(("backup", "quick_is_done"), [(0, False), (1, True)])
def test_backup_workers(serve: Serve, backup: int, quick_is_done: bool) -> None:
    server = serve("--min-workers", 2, "--backup-workers", backup, "--metrics-bind", "127.0.0.1:0")
    address = server.address
    with counter(address, rank=0) as quick, counter(address, rank=1) as slow:
        pushing = threading.Thread(target=count, args=(quick,))
        pushing.start()
        pushing.join(1.0)

        assert pushing.is_alive() is not quick_is_done
        assert slow.push(ONES).status == ("stale" if quick_is_done else "applied")
        pushing.join()
        until(
            lambda: Metrics(server.monitor.address)("ps_backup_workers") == backup,
            "its number among the metrics",
        )


def test_the_data_of_a_late_gradient_are_dealt_again(serve: Serve) -> None:
    server = serve("--min-workers", 2, "--backup-workers", 1)
    loop = LoopSpec(0, size=2, batch_size=1)
    with counter(server.address, rank=0) as quick, counter(server.address, rank=1) as slow:
        mine, others = (client.data.next_batches(loop).numbers[0] for client in (quick, slow))
        buffer = memoryview(bytearray(quick.plan.nbytes))
        assert (
            quick.model.exchange(gradients=buffer, weights=None, batches=[BatchKey(0, mine)]).status
            == "applied"
        )
        assert (
            slow.model.exchange(
                gradients=buffer, weights=None, batches=[BatchKey(0, others)]
            ).status
            == "stale"
        )
        slow.data.return_batches([BatchKey(0, others)])  # the optimizer does this

        (row,) = status(server.address)["data"]
        assert row["dropped"] == 0
        assert others in quick.data.next_batches(loop).numbers


@server_setting("global_batch")
@pytest.mark.parametrize(("flags", "following"), [([], ()), (["--global-batch", 6], (2, 1, 0))])
def test_global_batch(serve: Serve, flags: list[object], following: tuple[int, ...]) -> None:
    """The number of batches in one push."""
    with counter(serve(*flags).address) as client:
        lease = client.data.next_batches(LoopSpec(0, size=12, batch_size=2), count=3)

        assert lease.following == following


# ---- bad gradients -------------------------------------------------------------------------------


@server_setting("bad_gradients")
@pytest.mark.parametrize(
    ("what", "statuses"), [("skip", ["rejected", "applied"]), ("clip", ["applied", "applied"])]
)
def test_bad_gradients(serve: Serve, what: str, statuses: list[str]) -> None:
    with counter(serve("--bad-gradients", what).address) as client:
        assert [client.push(push).status for push in (NANS, ONES)] == statuses
        assert counted(client.pull()) == 1


def test_bad_gradients_abort(serve: Serve) -> None:
    server = serve()
    with counter(server.address) as client:
        with suppress(PSError):  # the job may end before the answer
            client.push(NANS)
        assert server.ended.wait(30)

        assert server.failure is not None
        assert server.failure.exit_code == 14
        assert f"worker {client.worker} (rank 0, " in str(server.failure)


@server_setting("max_norm")
@pytest.mark.parametrize(
    ("flags", "status", "share"),
    [
        (["--max-norm", NORM * 1.01], "applied", 1.0),
        (["--max-norm", NORM * 0.99, "--bad-gradients", "skip"], "rejected", 0.0),
        (["--max-norm", NORM / 4, "--bad-gradients", "clip"], "applied", 0.25),
    ],
)
def test_max_norm(serve: Serve, flags: list[object], status: str, share: float) -> None:
    """Of the whole gradient, over all shards."""
    leader = serve("--shard", "0/2", *flags)
    serve("--shard", "1/2", "--join", leader.address, *flags)
    with counter(leader.address) as client:
        result = client.push(ONES)

        assert result.status == status
        assert result.reason.startswith("OUTLIER: worker 1 (rank 0, ") or status == "applied"
        for array in client.pull().values():
            np.testing.assert_allclose(array, -share, rtol=1e-5)


@server_setting("quarantine_after")
@pytest.mark.parametrize(("flags", "out"), [([], False), (["--quarantine-after", 2], True)])
def test_quarantine_after(serve: Serve, flags: list[object], out: bool) -> None:
    server = serve("--bad-gradients", "skip", *flags)
    with counter(server.address) as client:
        for push in (NANS, ONES, NANS):
            client.push(push)
        with pytest.raises(QuarantinedError) if out else nullcontext():
            client.push(NANS)

        (row,) = status(server.address)["workers"]
        assert row["state"] == ("lost" if out else "active")
        assert row["reason"].startswith("QUARANTINED after 2 bad gradients in a row") is out


# ---- restarts ------------------------------------------------------------------------------------


@server_setting("durability")
@pytest.mark.parametrize(("durability", "expected"), [("snapshot", 2), ("log", 3)])
def test_durability(serve: Serve, tmp_path: Path, durability: str, expected: int) -> None:
    flags = ["--data-dir", tmp_path, "--snapshot-every", "1h", "--durability", durability]
    server = serve(*flags)
    with counter(server.address) as client:
        count(client, 2)
        saved(server.address)
        count(client)
        server.close()

    assert status(serve(*flags).address)["version"] == expected


def saved(address: str) -> None:
    """Take a snapshot of the current version, as ps-ctl does."""
    with closing(open_channel(Endpoint(address))) as channel:
        CoordinatorServiceStub(channel).SaveSnapshot(
            co.SaveSnapshotRequest(wait_ms=20_000), timeout=30
        )


@server_setting("log_fsync")
@pytest.mark.parametrize(("mode", "each"), [("always", True), ("no", False)])
def test_log_fsync(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, each: bool
) -> None:
    """Whether a push waits for the disk. A new segment always does, and the snapshot that follows
    the last worker's leave begins one: only what the push has synced counts.
    """
    server, synced = serve("--data-dir", tmp_path, "--durability", "log", "--log-fsync", mode), []
    with counter(server.address) as client:
        monkeypatch.setattr(record_segment.os, "fdatasync", synced.append)
        count(client)
        waits_for_disk = bool(synced)

    assert waits_for_disk is each


# ---- standbys ------------------------------------------------------------------------------------


@server_setting("standby_of", "failover_lock")
@pytest.mark.parametrize("locked", [False, True])
def test_standby_of_and_failover_lock(serve: Serve, tmp_path: Path, locked: bool) -> None:
    """It follows that server; the lock, if set, permits the takeover."""
    flags = ["--failover-lock", str(tmp_path)] if locked else []
    server = serve(*flags)
    config = configured("--standby-of", server.address, *flags)
    with RunningStandby(
        server, standby_of=config.standby_of, failover_lock=config.failover_lock
    ) as following:
        following.in_sync()
        tenure = LeaseDirectory(tmp_path, 0).read()

        assert (tenure is not None and tenure.in_sync == following.standby.name) is locked


def test_a_push_waits_for_a_standby_that_does_not_acknowledge(serve: Serve) -> None:
    server = serve("--policy", "async")
    with counter(server.address) as client, silent_standby(server) as speaking:
        pushing = threading.Thread(target=count, args=(client,))
        pushing.start()
        pushing.join(0.5)
        assert pushing.is_alive()
        assert server.engine.live.version == 0
        speaking.set()
        pushing.join(10)
        assert server.engine.live.version == 1
