"""Standbys of real processes: primaries that are killed, stopped or told to go, while workers
push ones.
"""

import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pscommon.core.errors import PSError
from pscommon.core.exit_codes import ExitCode
from pscommon.wire.channel import open_channel
from psproto.v1 import standby_pb2 as pb
from psproto.v1.standby_pb2_grpc import StandbyServiceStub
from psserver.core.shard.failover import TAKEOVER_TIMEOUT_SECONDS
from psserver.process.generation_file import GENERATION
from psworker.connection.discovery import describe
from psworker.ctl.job_client import CoordinatorClient
from tests.support.metrics_scrape import Metrics, get
from tests.support.pushes_over_failover import (
    FLAGS,
    POLICIES,
    WORKERS,
    awaited,
    finish,
    goes_on,
    running,
)
from tests.support.standby_job import StandbyJob
from tests.support.worker_scripts import count
from tests.support.workers import counted, snapshots, status, until, weights_of

pytestmark = pytest.mark.timing


@pytest.mark.parametrize("shard", [1, 0])
@pytest.mark.parametrize("policy", POLICIES)
def test_killed_primary_is_followed_at_once(tmp_path: Path, policy: str, shard: int) -> None:
    with StandbyJob(tmp_path, 2, (*POLICIES[policy], *FLAGS), count, pushes=10**6) as job:
        running(job, shard)
        job.lives[f"s{shard}"].kill()
        took = goes_on(job, time.monotonic())
        print(f"failover of shard {shard} in {policy}: {took:.1f} s")
        finish(job, policy)


@pytest.mark.parametrize("shard", [1, 0])
def test_primary_that_was_told_to_end_is_followed(tmp_path: Path, shard: int) -> None:
    """By SIGTERM: its host is needed, say. The job goes on."""
    with StandbyJob(tmp_path, 2, (*POLICIES["sync"], *FLAGS), count, pushes=10**6) as job:
        running(job, shard)
        old = job.lives[f"s{shard}"]
        old.send(signal.SIGTERM)
        awaited(job, lambda: old.ended is not None, "its end")
        assert old.ended == ExitCode.TERMINATED, job.said()
        took = goes_on(job, time.monotonic())
        print(f"failover of shard {shard}, told to end: {took:.1f} s")
        finish(job, "sync")


@pytest.mark.parametrize("shard", [1, 0])
def test_stopped_primary_is_followed_and_ends_when_it_wakes(tmp_path: Path, shard: int) -> None:
    """It lives, and still has its port and its lines: whatever it says, nobody believes it."""
    with StandbyJob(tmp_path, 2, (*POLICIES["async"], *FLAGS), count, pushes=10**6) as job:
        running(job, shard)
        old = job.lives[f"s{shard}"]
        old.send(signal.SIGSTOP)
        took = goes_on(job, time.monotonic())
        print(f"failover of shard {shard}, stopped: {took:.1f} s")
        old.send(signal.SIGCONT)
        until(lambda: old.ended is not None, "the end of the old primary")
        assert old.ended == ExitCode.TAKEN, job.said()
        assert "is not primary of its shard any more" in old.log.read_text()
        goes_on(job, time.monotonic())
        finish(job, "async")


def test_the_data_directory_of_one_that_was_stopped_is_written_to_again_after_a_switch(
    tmp_path: Path,
) -> None:
    """As the log says: as long as it is stopped nobody else may write there, and so there are no
    snapshots.
    """
    data = ("--data-dir", tmp_path / "data", "--snapshot-every", "50steps", "--durability", "log")
    with StandbyJob(tmp_path, 2, (*POLICIES["async"], *FLAGS, *data), count, pushes=10**6) as job:
        running(job, 1)
        old = job.lives["s1"]
        old.send(signal.SIGSTOP)
        goes_on(job, time.monotonic())
        assert "Try: start a standby of this server" in job.lives["b1"].log.read_text()
        old.send(signal.SIGCONT)
        until(lambda: old.ended is not None, "the end of the old primary")

        job.followed.add(1)
        job.start("s1")
        until(lambda: job.in_sync(1), "in sync")
        promoted(job.address.split(",")[1])
        goes_on(job, time.monotonic())
        reached = status(job.address)["version"]
        awaited(job, lambda: max(snapshots(job.address), default=0) > reached, "another snapshot")
        finish(job, "async")


@pytest.mark.parametrize("refused", ["generation", "the whole directory"])
def test_a_disk_that_refuses_keeps_nobody_from_taking_over(tmp_path: Path, refused: str) -> None:
    """Shard 0 counts its starts there."""
    data, whole = tmp_path / "data", refused != "generation"
    flags = (*POLICIES["sync"], *FLAGS, "--data-dir", data, "--snapshot-every", "1h")
    with StandbyJob(tmp_path, 1, flags, count, pushes=10**6) as job:
        running(job, 0)
        job.lives["s0"].kill()
        shutil.rmtree(data)
        if whole:
            data.touch()
        else:
            (data / GENERATION).mkdir(parents=True)
        goes_on(job, time.monotonic())
        told = "data_dir_abandoned" if whole else "start_not_counted"
        assert told in job.lives["b0"].log.read_text()
        finish(job, "sync")


@pytest.mark.parametrize("shard", [1, 0])
def test_the_old_primary_comes_back_as_standby_and_takes_over_again(
    tmp_path: Path, shard: int
) -> None:
    """Started as before, by whoever watches it, it must not: it has nothing."""
    with StandbyJob(tmp_path, 2, (*POLICIES["sync"], *FLAGS), count, pushes=10**6) as job:
        running(job, shard)
        job.lives[f"s{shard}"].kill()
        goes_on(job, time.monotonic())

        job.start(f"s{shard}")
        until(lambda: job.lives[f"s{shard}"].ended is not None, "its end")
        assert job.lives[f"s{shard}"].ended == ExitCode.TAKEN
        assert (
            f"start this server with `--standby-of {job.standby(shard)}`"
            in job.lives[f"s{shard}"].log.read_text()
        )

        job.followed.add(shard)
        job.start(f"s{shard}")
        until(lambda: job.in_sync(shard), "in sync")
        job.lives[f"b{shard}"].kill()
        goes_on(job, time.monotonic())
        assert job.servers()[shard]["term"] == 3
        finish(job, "sync")


def test_one_shard_after_the_other_is_followed(tmp_path: Path) -> None:
    """The second one's standby was there before it could hear where shard 0 would be."""
    with StandbyJob(tmp_path, 2, (*POLICIES["async"], *FLAGS), count, pushes=10**6) as job:
        running(job, 1)
        job.start("b0")
        awaited(job, lambda: job.in_sync(0), "in sync")
        for shard in (0, 1):
            job.lives[f"s{shard}"].kill()
            goes_on(job, time.monotonic())
        finish(job, "async")


def test_after_a_failover_of_shard_0_the_others_say_where_it_is(tmp_path: Path) -> None:
    """To ps-ctl; and one that is started again, with the command line of before, hears it from
    the workers.
    """
    data = ("--data-dir", tmp_path / "data", "--durability", "log")
    with StandbyJob(tmp_path, 2, (*POLICIES["async"], *FLAGS, *data), count, pushes=10**6) as job:
        running(job, 0)
        job.lives["s0"].kill()
        goes_on(job, time.monotonic())
        assert terms(job.found(job.address.split(",")[1])) == {0: 2, 1: 1}

        job.lives["s1"].kill()
        job.start("s1")
        goes_on(job, time.monotonic(), 15.0)
        finish(job, "async")


@pytest.mark.parametrize("lock", [True, False], ids=["lock", "no lock"])
@pytest.mark.parametrize("shard", [1, 0])
def test_promote_is_a_planned_switch(tmp_path: Path, shard: int, lock: bool) -> None:
    """Nothing is lost, the old primary ends well, and what it was may be started as the standby
    of the new one.
    """
    with StandbyJob(tmp_path, 2, (*POLICIES["async"], *FLAGS), count, lock, pushes=10**6) as job:
        running(job, shard)
        assert get(job.monitors[shard], "/readyz").text.startswith("standby of ")
        since = time.monotonic()
        said = promoted(job.standby(shard))
        assert (said["term"], said["note"]) == (2, "")
        until(lambda: job.lives[f"s{shard}"].ended == 0, "the end of the old primary")
        took = goes_on(job, since)
        print(f"planned switch of shard {shard}: {took:.1f} s")
        assert Metrics(job.monitors[shard])("ps_version", shard=str(shard)) > said["version"]
        assert get(job.monitors[shard], "/readyz").text.startswith("version ")
        finish(job, "async")


def promoted(address: str) -> dict[str, Any]:
    """As ps-ctl promote."""
    with open_channel(address) as channel:
        answer = StandbyServiceStub(channel).Promote(pb.PromoteRequest(wait_ms=10_000), timeout=15)
    return {"term": answer.term, "version": answer.version, "note": answer.note}


def test_without_a_lock_a_dead_primary_is_followed_when_somebody_says_so(tmp_path: Path) -> None:
    with StandbyJob(
        tmp_path, 1, (*POLICIES["async"], *FLAGS), count, lock=False, pushes=10**6
    ) as job:
        running(job, 0)
        job.lives["s0"].kill()
        # what must not happen needs a while in which it could
        threading.Event().wait(TAKEOVER_TIMEOUT_SECONDS + 0.5)
        with pytest.raises(PSError, match="is a standby"):
            describe(job.standby(0))

        said = promoted(job.standby(0))

        assert said["note"].endswith(
            f"did not answer; this standby continues from version {said['version']}"
        )
        goes_on(job, time.monotonic())
        finish(job, "async", as_new=True)


@pytest.mark.parametrize("shard", [1, 0])
def test_a_primary_that_dies_amid_a_move_is_followed(tmp_path: Path, shard: int) -> None:
    """Its standby has what it held when the move began, and no disk has: the new part is made of
    that.

    The move waits for a server that is stopped, until another one has taken over.
    """
    with StandbyJob(tmp_path, 3, (*POLICIES["async"], *FLAGS), count, pushes=10**6) as job:
        running(job, 0, 1)
        job.lives["s2"].send(signal.SIGSTOP)
        moving = threading.Thread(target=move, args=(job, 1))
        moving.start()
        first = job.address.split(",")[0]
        until(lambda: job.found(first).get("moving_to") == 1, "a move")

        job.lives[f"s{shard}"].kill()
        if shard == 0:
            first = job.standby(0)
        until(lambda: terms(job.found(first)).get(shard) == 2, "another primary")
        job.lives["s2"].send(signal.SIGCONT)

        until(lambda: job.found(first).get("moving_to", 0) is None, "the end of the move")
        moving.join()
        goes_on(job, time.monotonic())
        assert len(job.servers()) == 1
        finish(job, "async")


def terms(found: dict[str, Any]) -> dict[int, int]:
    """The how-many-eth primary each shard has."""
    return {row["shard"]: row["term"] for row in found.get("servers", ())}


def said_after(job: StandbyJob, name: str, first: str, second: str) -> bool:
    _, found, after = job.lives[name].log.read_text().partition(first)
    return bool(found) and second in after


def move(job: StandbyJob, shards: int) -> bool:
    """As ps-ctl reshard. False: servers are still to come, or who was asked has died before it
    answered.
    """
    try:
        with CoordinatorClient(job.address.split(",")[:1], 20.0) as servers:
            servers.reshard(shards, 20.0)
    except PSError:
        return False
    return True


@pytest.mark.parametrize("shard", [1, 0])
def test_who_took_over_after_a_move_knows_of_it(tmp_path: Path, shard: int) -> None:
    """Servers that are started again with the command line of before come back into the job as
    it is.
    """
    with StandbyJob(tmp_path, 2, (*POLICIES["async"], *FLAGS), count, pushes=10**6) as job:
        running(job, 0, 1)
        job.add_servers(3)
        until(lambda: move(job, 3), "the end of the move")
        finished = {0: "reshard finished", 1: "the model was resharded"}
        until(
            lambda: said_after(job, f"s{shard}", finished[shard], "the standby is in sync"),
            "in sync again",
        )
        job.lives[f"s{shard}"].kill()
        goes_on(job, time.monotonic())
        assert [len(job.servers()), job.servers()[shard]["term"]] == [3, 2]

        job.followed.add(shard)
        job.start(f"s{shard}")
        until(lambda: job.in_sync(shard), "in sync")
        finish(job, "async")


@pytest.mark.parametrize("shard", [1, 0])
def test_async_shipping_ends_in_one_state_on_all_shards(tmp_path: Path, shard: int) -> None:
    """The standby may lack the newest updates: then all go back to the newest snapshot, and no
    shard knows others.
    """
    data = ("--data-dir", tmp_path / "data", "--snapshot-every", "20steps", "--shipping", "async")
    with StandbyJob(tmp_path, 2, (*POLICIES["async"], *FLAGS, *data), count, pushes=10**6) as job:
        running(job, shard)
        until(lambda: snapshots(job.address), "a snapshot")
        job.lives[f"s{shard}"].kill()
        print(f"failover of shard {shard}, shipping async: {goes_on(job, time.monotonic()):.1f} s")
        for rank in range(WORKERS):
            job.lives[f"w{rank}"].kill()
        assert counted(weights_of(job.address)) == status(job.address)["version"]
        assert "Traceback" not in job.said()


@pytest.mark.parametrize("shard", [1, 0])
def test_who_took_over_keeps_a_log(tmp_path: Path, shard: int) -> None:
    """In the data directory that its predecessor had: a snapshot soon makes the log whole, and a
    restart finds it.
    """
    data = ("--data-dir", tmp_path / "data", "--snapshot-every", "1h", "--durability", "log")
    with StandbyJob(tmp_path, 2, (*POLICIES["sync"], *FLAGS, *data), count, pushes=10**6) as job:
        running(job, shard)
        job.lives[f"s{shard}"].kill()
        goes_on(job, time.monotonic())
        until(lambda: snapshots(job.address), "a snapshot")
        job.lives[f"b{shard}"].kill()
        job.start(f"s{shard}")
        goes_on(job, time.monotonic(), 15.0)
        finish(job, "sync")


def test_a_shard_that_dies_with_shard_0_goes_on_from_its_log(tmp_path: Path) -> None:
    """Shard 0's standby tells it from which snapshot on: the newest, also if that was written
    after the standby had loaded. Of the log before that one nothing is left."""
    data = ("--data-dir", tmp_path / "data", "--snapshot-every", "50steps", "--durability", "log")
    with StandbyJob(tmp_path, 2, (*POLICIES["async"], *FLAGS, *data), count, pushes=10**6) as job:
        running(job, 0)
        first = max(snapshots(job.address), default=0)
        awaited(job, lambda: max(snapshots(job.address), default=0) > first + 50, "more snapshots")
        for shard in (0, 1):
            job.lives[f"s{shard}"].kill()
        job.start("s1")
        goes_on(job, time.monotonic(), 15.0)
        finish(job, "async")
