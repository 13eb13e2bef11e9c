"""A worker that is killed beside its servers: its death is proven at once, and --on-worker-loss
waits for no lease.
"""

import signal
import time
from itertools import pairwise
from pathlib import Path

import pytest

from pscommon.core.exit_codes import ExitCode
from tests.support.counted_steps import check_data, made, steps
from tests.support.forked_job import ForkedJob
from tests.support.machine_time import machine_seconds
from tests.support.process_job import state_of
from tests.support.worker_scripts import train
from tests.support.workers import status, until

pytestmark = pytest.mark.timing

LEASE = 20.0
"""Far longer than any of these tests may take to notice a death."""
WITHIN = 1.0
"""Seconds within which the others continue."""
PAUSE = 0.05
SECONDS = 100


def job(folder: Path, shards: int, *flags: object) -> ForkedJob:
    settings = ("--lease", f"{LEASE:g}s", "--min-workers", 2, *flags)
    return ForkedJob(folder, shards, settings, train, pause=PAUSE, epochs=12)


def members(running: ForkedJob) -> dict[int, dict[str, object]]:
    """The workers in the status, by number."""
    return {row["worker"]: row for row in status(running.address)["workers"]}


@pytest.mark.parametrize("shards", [1, 2])
def test_with_shrink_sync_continues_within_a_second(tmp_path: Path, shards: int) -> None:
    with job(tmp_path, shards) as running:
        running.start_all(2)
        made(running, 5, "w1")
        killed_at = time.monotonic()
        running.lives["w1"].kill()
        before = len(steps(running, "w0"))
        made(running, before + 20, "w0")
        del running.lives["w1"]
        running.tend(running.workers_done, SECONDS)

        stall = max(machine_seconds(a, b) for a, b in pairwise(steps(running, "w0")))
        print(f"\n{shards} shards: the others stood still for {stall:.2f} s after a kill")
        assert stall < WITHIN
        assert time.monotonic() - killed_at < LEASE
        (lost,) = (row for row in members(running).values() if row["rank"] == 1)
        assert (lost["state"], lost["reason"]) == ("lost", "its process has ended")
        check_data(running)


def test_with_wait_a_successor_takes_the_place_at_once(tmp_path: Path) -> None:
    """Also without a launcher that tells attempts apart: nothing else could show before a lease
    that the old one died. Nobody trains without it meanwhile."""
    with job(tmp_path, 1, "--on-worker-loss", "wait:60s") as running:
        running.start_all(2)
        made(running, 5, "w1")
        killed = running.lives["w1"]
        killed.kill()
        killed.attempt = -1  # the next one is attempt 0 again
        until(
            lambda: "worker_silent" in running.lives["s0"].log.read_text(),
            "a place that is kept",
        )
        before = len(steps(running, "w0"))
        started_at = time.monotonic()
        running.start("w1")
        made(running, before + 5, "w0")
        assert time.monotonic() - started_at < LEASE / 2
        running.tend(running.workers_done, SECONDS)

        (lost,) = (row for row in members(running).values() if row["state"] == "lost")
        assert "was started in its place" in str(lost["reason"])
        check_data(running)


def test_with_abort_the_job_ends_at_once(tmp_path: Path) -> None:
    with job(tmp_path, 2, "--on-worker-loss", "abort") as running:
        running.start_all(2)
        made(running, 5, "w1")
        running.lives["w1"].kill()
        killed_at = time.monotonic()
        until(
            lambda: all(running.lives[name].ended is not None for name in ("w0", "s0", "s1")),
            "the end of all",
        )
        print(f"\nthe job ended {time.monotonic() - killed_at:.2f} s after a kill")

        assert time.monotonic() - killed_at < LEASE / 2
        assert running.lives["s0"].ended == ExitCode.TOO_FEW_WORKERS
        for name in ("s0", "w0"):
            assert (
                "its process has ended (--on-worker-loss abort)"
                in running.lives[name].log.read_text()
            )


def test_a_broken_connection_and_a_stopped_process_prove_nothing(tmp_path: Path) -> None:
    """A worker whose process is there keeps its place for a lease, whatever its connections do."""
    with job(tmp_path, 1) as running:
        running.start_all(2)
        made(running, 5, "w1")
        stopped = running.lives["w1"]
        stopped.send(signal.SIGSTOP)
        assert stopped.process.pid is not None
        until(lambda: state_of(stopped.process.pid or 0) == "T", "a stopped worker")
        looked_at = time.monotonic()
        until(lambda: time.monotonic() - looked_at > 2 * WITHIN, "some looks at the process")
        assert {row["state"] for row in members(running).values()} == {"active"}

        stopped.send(signal.SIGCONT)
        running.tend(running.workers_done, SECONDS)
        assert {row["state"] for row in members(running).values()} == {"left"}
        check_data(running)
