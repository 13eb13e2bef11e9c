"""Workers that push during failovers, and checks of the counted pushes."""

from collections.abc import Callable
from typing import Any

from tests.support.machine_time import machine_seconds
from tests.support.proxied_job import lines
from tests.support.standby_job import StandbyJob
from tests.support.workers import counted, status, until, weights_of

POLICIES = {"sync": ("--policy", "sync"), "async": ("--policy", "async")}
FLAGS = ("--lease", "30s", "--min-workers", 2)
WORKERS = 2
PUSHES_AFTER_FAILOVER = 30
"""Pushes of each worker that must follow a failover."""
FAILOVER_SECONDS = 5.0
"""Longest time without pushes."""


def push_count(job: StandbyJob, rank: int) -> int:
    return len(lines(job.processes[f"w{rank}"], "pushed"))


def start_in_sync(job: StandbyJob, *shards: int) -> None:
    """Start servers, workers and standbys of these shards; wait for pushes and synchronization."""
    job.start_all(WORKERS)
    job.start(*(f"b{shard}" for shard in shards))
    wait_until(job, lambda: min(push_count(job, rank) for rank in range(WORKERS)) > 5, "pushes")
    wait_until(job, lambda: job.in_sync(*shards), "in sync")


def wait_until(job: StandbyJob, condition: Callable[[], object], what: str) -> None:
    """Wait for the condition; include all logs in a failure."""
    try:
        until(condition, what, 30)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{job.all_logs()}") from None


def wait_for_pushes(job: StandbyJob, since: float, seconds: float = FAILOVER_SECONDS) -> float:
    """Wait until workers push again; return the seconds without pauses of the machine."""
    before = [push_count(job, rank) for rank in range(WORKERS)]
    wait_until(
        job,
        lambda: all(push_count(job, rank) > before[rank] + 2 for rank in range(WORKERS)),
        "pushes again",
    )
    took = machine_seconds(since)
    assert took <= seconds, f"{took:.1f} s\n{job.all_logs()}"
    counts = [push_count(job, rank) for rank in range(WORKERS)]
    wait_until(
        job,
        lambda: all(
            push_count(job, rank) > counts[rank] + PUSHES_AFTER_FAILOVER for rank in range(WORKERS)
        ),
        "more pushes",
    )
    return took


def read_consistent_state(job: StandbyJob) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return status and weights of one version; the end of a worker may close a round in
    between.
    """
    while True:
        job_status, weights = status(job.address), weights_of(job.address)
        if status(job.address)["version"] == job_status["version"]:
            return job_status, weights


def stop_and_check(job: StandbyJob, policy: str, rejoined: bool = False) -> None:
    """Kill the workers and check that acknowledged pushes have counted on every shard.

    The last push of each worker may count unacknowledged, also when the worker had to rejoin.
    """
    for rank in range(WORKERS):
        job.processes[f"w{rank}"].kill()
    job_status, weights = read_consistent_state(job)
    acknowledged = sum(push_count(job, rank) for rank in range(WORKERS))
    assert acknowledged <= job_status["steps"] <= acknowledged + WORKERS * (1 + rejoined)
    assert counted(weights) == job_status["version"]
    logs = [process.log.read_text() for process in job.processes.values()]
    assert not any("Traceback" in each for each in logs), job.all_logs()
    assert sum("fenced" in each for each in logs) == WORKERS * rejoined, job.all_logs()
