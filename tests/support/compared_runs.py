"""A training of real processes, and its result where no process is killed."""

from pathlib import Path

from tests.support.forked_job import ForkedJob
from tests.support.worker_scripts import train
from tests.support.workers import digest, status

SHARDS, WORKERS, KILLS = 2, 2, 20
FLAGS = ("--min-workers", WORKERS, "--lease", "2s", "--snapshot-every", "20steps")
LOG, WAIT = ("--durability", "log"), ("--on-worker-loss", "wait:60s")
EPOCHS, PAUSE = 20, 0.03
SECONDS = 110


def undisturbed(folder: Path, **options: object) -> str:
    """The digest of a run in which nobody dies."""
    folder.mkdir()
    with ForkedJob(folder, SHARDS, [*FLAGS, *LOG, *WAIT], train, epochs=EPOCHS, **options) as job:
        job.start_all(WORKERS)
        job.tend(job.workers_done, SECONDS)
        return digest(job.address)


def check_data(job: ForkedJob) -> None:
    """Each sample has counted exactly once an epoch."""
    told = status(job.address)
    (row,) = told["data"]
    assert (told["samples"], row["dropped"], row["duplicates"]) == (80 * EPOCHS, 0, 0)
