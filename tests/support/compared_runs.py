"""A training by real processes, and its result without kills."""

from pathlib import Path

from tests.support.forked_job import ForkedJob
from tests.support.worker_scripts import train
from tests.support.workers import digest, status

SHARDS, WORKERS, KILLS = 2, 2, 20
FLAGS = ("--min-workers", WORKERS, "--lease", "2s", "--snapshot-every", "20steps")
LOG, WAIT = ("--durability", "log"), ("--on-worker-loss", "wait:60s")
EPOCHS, PAUSE = 20, 0.03
SECONDS = 110


def digest_without_kills(folder: Path, **options: object) -> str:
    """Return the digest of a run without kills."""
    folder.mkdir()
    with ForkedJob(folder, SHARDS, [*FLAGS, *LOG, *WAIT], train, epochs=EPOCHS, **options) as job:
        job.start_all(WORKERS)
        job.supervise(job.workers_done, SECONDS)
        return digest(job.address)


def check_data(job: ForkedJob) -> None:
    """Check that each sample counted exactly once per epoch."""
    job_status = status(job.address)
    (row,) = job_status["data"]
    assert (job_status["samples"], row["dropped"], row["duplicates"]) == (80 * EPOCHS, 0, 0)
