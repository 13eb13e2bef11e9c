"""Failover between real processes: primaries are killed, stopped or terminated while workers
push.
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
from pscommon.wire.endpoint import Endpoint, open_channel
from pscommon.wire.requests import PROMOTE, Stub
from psproto.v1 import standby_pb2 as pb
from psserver.core.shard.failover import TAKEOVER_TIMEOUT_SECONDS
from psserver.process.generation_file import GENERATION
from psworker.connection.discovery import describe
from psworker.ctl.job_client import CoordinatorClient
from tests.support.metrics_scrape import Metrics, get
from tests.support.pushes_over_failover import (
    FLAGS,
    POLICIES,
    start_in_sync,
    stop_and_check,
    wait_for_pushes,
    wait_until,
)
from tests.support.standby_job import StandbyJob
from tests.support.worker_scripts import count
from tests.support.workers import snapshots, status, until

pytestmark = pytest.mark.timing


@pytest.mark.parametrize("shard", [1, 0])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_standby_replaces_a_killed_primary_at_once(
    tmp_path: Path, policy: str, shard: int
) -> None:
    options: dict[str, Any] = {"pushes": 10**6, "lanes": ("stream", "grpc")}  # by rank
    with StandbyJob(tmp_path, 2, (*POLICIES[policy], *FLAGS), count, **options) as job:
        start_in_sync(job, shard)
        job.processes[f"s{shard}"].kill()
        took = wait_for_pushes(job, time.monotonic())
        print(f"failover of shard {shard} in {policy}: {took:.1f} s")
        stop_and_check(job, policy)


@pytest.mark.parametrize("shard", [1, 0])
def test_a_standby_replaces_a_primary_that_gets_sigterm(tmp_path: Path, shard: int) -> None:
    """Its host may be needed for something else; the job continues."""
    with StandbyJob(tmp_path, 2, (*POLICIES["sync"], *FLAGS), count, pushes=10**6) as job:
        start_in_sync(job, shard)
        old = job.processes[f"s{shard}"]
        old.send(signal.SIGTERM)
        wait_until(job, lambda: old.exit_code is not None, "the former primary to exit")
        assert old.exit_code == ExitCode.TERMINATED, job.all_logs()
        took = wait_for_pushes(job, time.monotonic())
        print(f"failover of shard {shard}, told to end: {took:.1f} s")
        stop_and_check(job, "sync")


@pytest.mark.parametrize("shard", [1, 0])
def test_a_stopped_primary_is_replaced_and_exits_when_it_resumes(
    tmp_path: Path, shard: int
) -> None:
    """It still has its port and connections, but its requests are fenced."""
    with StandbyJob(tmp_path, 2, (*POLICIES["async"], *FLAGS), count, pushes=10**6) as job:
        start_in_sync(job, shard)
        old = job.processes[f"s{shard}"]
        old.send(signal.SIGSTOP)
        took = wait_for_pushes(job, time.monotonic())
        print(f"failover of shard {shard}, stopped: {took:.1f} s")
        old.send(signal.SIGCONT)
        until(lambda: old.exit_code is not None, "the end of the old primary")
        assert old.exit_code == ExitCode.TAKEN, job.all_logs()
        assert "is not primary of its shard any more" in old.log.read_text()
        wait_for_pushes(job, time.monotonic())
        stop_and_check(job, "async")


def test_a_new_standby_restores_snapshots_after_a_primary_was_stopped(
    tmp_path: Path,
) -> None:
    """No other server may write into the data directory of a stopped primary, so there are no
    snapshots.
    """
    data = ("--data-dir", tmp_path / "data", "--snapshot-every", "50steps", "--durability", "log")
    with StandbyJob(tmp_path, 2, (*POLICIES["async"], *FLAGS, *data), count, pushes=10**6) as job:
        start_in_sync(job, 1)
        old = job.processes["s1"]
        old.send(signal.SIGSTOP)
        wait_for_pushes(job, time.monotonic())
        assert "start a standby of this server" in job.processes["b1"].log.read_text()
        old.send(signal.SIGCONT)
        until(lambda: old.exit_code is not None, "the end of the old primary")

        job.replaced.add(1)
        job.start("s1")
        until(lambda: job.in_sync(1), "in sync")
        promote(job.address.split(",")[1])
        wait_for_pushes(job, time.monotonic())
        reached = status(job.address)["version"]
        wait_until(
            job, lambda: max(snapshots(job.address), default=0) > reached, "another snapshot"
        )
        stop_and_check(job, "async")


@pytest.mark.parametrize("refused", ["generation", "directory"])
def test_failover_works_without_a_usable_data_directory(tmp_path: Path, refused: str) -> None:
    """Shard 0 counts its starts in that directory."""
    data, is_file = tmp_path / "data", refused != "generation"
    flags = (*POLICIES["sync"], *FLAGS, "--data-dir", data, "--snapshot-every", "1h")
    with StandbyJob(tmp_path, 1, flags, count, pushes=10**6) as job:
        start_in_sync(job, 0)
        job.processes["s0"].kill()
        shutil.rmtree(data)
        if is_file:
            data.touch()
        else:
            (data / GENERATION).mkdir(parents=True)
        wait_for_pushes(job, time.monotonic())
        expected_event = "data_dir_abandoned" if is_file else "start_not_counted"
        assert expected_event in job.processes["b0"].log.read_text()
        stop_and_check(job, "sync")


@pytest.mark.parametrize("shard", [1, 0])
def test_a_former_primary_returns_as_standby_and_takes_over_again(
    tmp_path: Path, shard: int
) -> None:
    """With its original command it must not start: it has no state."""
    with StandbyJob(tmp_path, 2, (*POLICIES["sync"], *FLAGS), count, pushes=10**6) as job:
        start_in_sync(job, shard)
        job.processes[f"s{shard}"].kill()
        wait_for_pushes(job, time.monotonic())

        job.start(f"s{shard}")
        until(
            lambda: job.processes[f"s{shard}"].exit_code is not None,
            "the former primary to exit",
        )
        assert job.processes[f"s{shard}"].exit_code == ExitCode.TAKEN
        assert (
            f"start this server with `--standby-of {job.standby(shard)}`"
            in job.processes[f"s{shard}"].log.read_text()
        )

        job.replaced.add(shard)
        job.start(f"s{shard}")
        until(lambda: job.in_sync(shard), "in sync")
        job.processes[f"b{shard}"].kill()
        wait_for_pushes(job, time.monotonic())
        assert job.servers()[shard]["term"] == 3
        stop_and_check(job, "sync")


def test_both_shards_fail_over_one_after_the_other(tmp_path: Path) -> None:
    """The standby of shard 1 starts before that of shard 0 has an address."""
    with StandbyJob(tmp_path, 2, (*POLICIES["async"], *FLAGS), count, pushes=10**6) as job:
        start_in_sync(job, 1)
        job.start("b0")
        wait_until(job, lambda: job.in_sync(0), "in sync")
        for shard in (0, 1):
            job.processes[f"s{shard}"].kill()
            wait_for_pushes(job, time.monotonic())
        stop_and_check(job, "async")


def test_shards_report_the_address_of_shard_0_after_its_failover(tmp_path: Path) -> None:
    """They tell ps-ctl. A shard restarted with its original command gets the address from
    workers.
    """
    data = ("--data-dir", tmp_path / "data", "--durability", "log")
    with StandbyJob(tmp_path, 2, (*POLICIES["async"], *FLAGS, *data), count, pushes=10**6) as job:
        start_in_sync(job, 0)
        job.processes["s0"].kill()
        wait_for_pushes(job, time.monotonic())
        assert terms(job.status_from(job.address.split(",")[1])) == {0: 2, 1: 1}

        job.processes["s1"].kill()
        job.start("s1")
        wait_for_pushes(job, time.monotonic(), 15.0)
        stop_and_check(job, "async")


@pytest.mark.parametrize("lock", [True, False], ids=["lock", "no lock"])
@pytest.mark.parametrize("shard", [1, 0])
def test_promote_switches_without_losing_pushes(tmp_path: Path, shard: int, lock: bool) -> None:
    """The former primary exits with 0 and can start as the standby of the new one."""
    with StandbyJob(tmp_path, 2, (*POLICIES["async"], *FLAGS), count, lock, pushes=10**6) as job:
        start_in_sync(job, shard)
        assert get(job.monitors[shard], "/readyz").text.startswith("standby of ")
        since = time.monotonic()
        promotion = promote(job.standby(shard))
        assert (promotion["term"], promotion["note"]) == (2, "")
        until(lambda: job.processes[f"s{shard}"].exit_code == 0, "the end of the old primary")
        took = wait_for_pushes(job, since)
        print(f"planned switch of shard {shard}: {took:.1f} s")
        assert Metrics(job.monitors[shard])("ps_version", shard=str(shard)) > promotion["version"]
        assert get(job.monitors[shard], "/readyz").text.startswith("version ")
        stop_and_check(job, "async")


def promote(address: str) -> dict[str, Any]:
    """Promote a standby as ps-ctl does; return the answer."""
    with open_channel(Endpoint(address)) as channel:
        answer = Stub(channel, PROMOTE)(pb.PromoteRequest(wait_ms=10_000), timeout=15)
    return {"term": answer.term, "version": answer.version, "note": answer.note}


def test_without_a_lock_a_standby_takes_over_only_on_promote(tmp_path: Path) -> None:
    with StandbyJob(
        tmp_path, 1, (*POLICIES["async"], *FLAGS), count, lock=False, pushes=10**6
    ) as job:
        start_in_sync(job, 0)
        job.processes["s0"].kill()
        # an unwanted failover would happen within this time
        threading.Event().wait(TAKEOVER_TIMEOUT_SECONDS + 0.5)
        with pytest.raises(PSError, match="is a standby"):
            describe(job.standby(0))

        promotion = promote(job.standby(0))

        assert promotion["note"].endswith(
            f"did not answer; this standby continues from version {promotion['version']}"
        )
        wait_for_pushes(job, time.monotonic())
        stop_and_check(job, "async", rejoined=True)


@pytest.mark.parametrize("shard", [1, 0])
def test_a_standby_replaces_a_primary_killed_during_a_reshard(tmp_path: Path, shard: int) -> None:
    """The new partition is made from the standby's memory; no disk has that state.

    A stopped server delays the reshard until the failover is complete.
    """
    with StandbyJob(tmp_path, 3, (*POLICIES["async"], *FLAGS), count, pushes=10**6) as job:
        start_in_sync(job, 0, 1)
        job.processes["s2"].send(signal.SIGSTOP)
        moving = threading.Thread(target=reshard, args=(job, 1))
        moving.start()
        first = job.address.split(",")[0]
        until(lambda: job.status_from(first).get("moving_to") == 1, "a move")

        job.processes[f"s{shard}"].kill()
        if shard == 0:
            first = job.standby(0)
        until(lambda: terms(job.status_from(first)).get(shard) == 2, "another primary")
        job.processes["s2"].send(signal.SIGCONT)

        until(lambda: job.status_from(first).get("moving_to", 0) is None, "the end of the move")
        moving.join()
        wait_for_pushes(job, time.monotonic())
        assert len(job.servers()) == 1
        stop_and_check(job, "async")


def terms(found: dict[str, Any]) -> dict[int, int]:
    """Return the term of each shard."""
    return {row["shard"]: row["term"] for row in found.get("servers", ())}


def is_logged_after(job: StandbyJob, name: str, first: str, second: str) -> bool:
    _, found, after = job.processes[name].log.read_text().partition(first)
    return bool(found) and second in after


def reshard(job: StandbyJob, shards: int) -> bool:
    """Reshard as ps-ctl does.

    Return False if servers are missing or the server exits before it answers.
    """
    try:
        with CoordinatorClient(job.address.split(",")[:1], 20.0) as servers:
            servers.reshard(shards, 20.0)
    except PSError:
        return False
    return True


@pytest.mark.parametrize("shard", [1, 0])
def test_failover_after_a_reshard_has_the_new_number_of_shards(tmp_path: Path, shard: int) -> None:
    """Servers restarted with their original commands rejoin the resharded job."""
    with StandbyJob(tmp_path, 2, (*POLICIES["async"], *FLAGS), count, pushes=10**6) as job:
        start_in_sync(job, 0, 1)
        job.add_servers(3)
        until(lambda: reshard(job, 3), "the end of the move")
        finished = {0: "reshard_finished", 1: "the model was resharded"}
        until(
            lambda: is_logged_after(job, f"s{shard}", finished[shard], "standby_in_sync"),
            "in sync again",
        )
        job.processes[f"s{shard}"].kill()
        wait_for_pushes(job, time.monotonic())
        assert [len(job.servers()), job.servers()[shard]["term"]] == [3, 2]

        job.replaced.add(shard)
        job.start(f"s{shard}")
        until(lambda: job.in_sync(shard), "in sync")
        stop_and_check(job, "async")


@pytest.mark.parametrize("shard", [1, 0])
def test_a_new_primary_writes_a_log_that_a_restart_recovers(tmp_path: Path, shard: int) -> None:
    """It uses the data directory of its predecessor; a snapshot soon makes the log complete."""
    data = ("--data-dir", tmp_path / "data", "--snapshot-every", "1h", "--durability", "log")
    with StandbyJob(tmp_path, 2, (*POLICIES["sync"], *FLAGS, *data), count, pushes=10**6) as job:
        start_in_sync(job, shard)
        job.processes[f"s{shard}"].kill()
        wait_for_pushes(job, time.monotonic())
        until(lambda: snapshots(job.address), "a snapshot")
        job.processes[f"b{shard}"].kill()
        job.start(f"s{shard}")
        wait_for_pushes(job, time.monotonic(), 15.0)
        stop_and_check(job, "sync")


def test_a_shard_killed_with_shard_0_recovers_from_its_log(tmp_path: Path) -> None:
    """Shard 0's standby names the newest snapshot, even if it was written after the standby loaded.
    Older log segments are gone.
    """
    data = ("--data-dir", tmp_path / "data", "--snapshot-every", "50steps", "--durability", "log")
    with StandbyJob(tmp_path, 2, (*POLICIES["async"], *FLAGS, *data), count, pushes=10**6) as job:
        start_in_sync(job, 0)
        first = max(snapshots(job.address), default=0)
        wait_until(
            job, lambda: max(snapshots(job.address), default=0) > first + 50, "more snapshots"
        )
        for shard in (0, 1):
            job.processes[f"s{shard}"].kill()
        job.start("s1")
        wait_for_pushes(job, time.monotonic(), 15.0)
        stop_and_check(job, "async")
