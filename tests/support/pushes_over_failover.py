"""Workers that push while primaries fail, and what must have counted then."""

from collections.abc import Callable
from typing import Any

from tests.support.machine_time import machine_seconds
from tests.support.proxied_job import lines
from tests.support.standby_job import StandbyJob
from tests.support.workers import counted, status, until, weights_of

POLICIES = {"sync": ("--policy", "sync"), "async": ("--policy", "async")}
FLAGS = ("--lease", "30s", "--min-workers", 2)
WORKERS = 2
MORE = 30
"""Pushes of each worker after a failover."""
FAILOVER = 5.0
"""Seconds in which it has to be over."""


def pushed(job: StandbyJob, rank: int) -> int:
    return len(lines(job.lives[f"w{rank}"], "pushed"))


def running(job: StandbyJob, *shards: int) -> None:
    """All servers, standbys for these shards, and workers that push; returns once they do and
    all are in sync.
    """
    job.start_all(WORKERS)
    job.start(*(f"b{shard}" for shard in shards))
    awaited(job, lambda: min(pushed(job, rank) for rank in range(WORKERS)) > 5, "pushes")
    awaited(job, lambda: job.in_sync(*shards), "in sync")


def awaited(job: StandbyJob, condition: Callable[[], object], what: str) -> None:
    """Waits for it; where it does not come, tells all that was said."""
    try:
        until(condition, what, 30)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{job.said()}") from None


def goes_on(job: StandbyJob, since: float, seconds: float = FAILOVER) -> float:
    """Workers push again; returns for how long nobody could while the machine ran."""
    before = [pushed(job, rank) for rank in range(WORKERS)]
    awaited(
        job,
        lambda: all(pushed(job, rank) > before[rank] + 2 for rank in range(WORKERS)),
        "pushes again",
    )
    took = machine_seconds(since)
    assert took <= seconds, f"{took:.1f} s\n{job.said()}"
    more = [pushed(job, rank) for rank in range(WORKERS)]
    awaited(
        job,
        lambda: all(pushed(job, rank) > more[rank] + MORE for rank in range(WORKERS)),
        "more pushes",
    )
    return took


def at_one_version(job: StandbyJob) -> tuple[dict[str, Any], dict[str, Any]]:
    """Status and weights of the same version. The end of a worker may close a round between two
    readings.
    """
    while True:
        found, weights = status(job.address), weights_of(job.address)
        if status(job.address)["version"] == found["version"]:
            return found, weights


def finish(job: StandbyJob, policy: str, as_new: bool = False) -> None:
    """What was acknowledged is what has counted, on every shard; but for the push that each
    worker was in when it was killed here, or had to come as new."""
    for rank in range(WORKERS):
        job.lives[f"w{rank}"].kill()
    found, weights = at_one_version(job)
    acknowledged = sum(pushed(job, rank) for rank in range(WORKERS))
    assert acknowledged <= found["steps"] <= acknowledged + WORKERS * (1 + as_new)
    assert counted(weights) == found["version"]
    said = [life.log.read_text() for life in job.lives.values()]
    assert not any("Traceback" in each for each in said), job.said()
    assert sum("fenced" in each for each in said) == WORKERS * as_new, job.said()
