"""A job of real processes whose workers log each step."""

from pathlib import Path

from tests.support.forked_job import ForkedJob
from tests.support.worker_scripts import train
from tests.support.workers import status, until

LEASE = 2.0
PAUSE = 0.05


def job(folder: Path, *flags: object, **options: object) -> ForkedJob:
    return ForkedJob(
        folder, 1, ["--lease", f"{LEASE:g}s", *flags], train, **{"pause": PAUSE, **options}
    )


def steps(job: ForkedJob, *names: str) -> list[float]:
    """Return the sorted times of the steps of these workers, or of all."""
    logs = [
        process.log
        for process in job.all
        if process.name.startswith("w") and (process.name in names or not names)
    ]
    lines = [line for log in logs if log.exists() for line in log.read_text().splitlines()]
    return sorted(float(line.split()[1]) for line in lines if line.startswith("step "))


def wait_for_steps(job: ForkedJob, count: int, *names: str) -> None:
    """Wait until these workers have made `count` steps."""
    until(lambda: len(steps(job, *names)) >= count, f"{count} steps of {names or 'all'}")


def check_data(job: ForkedJob) -> None:
    """Check that each batch counted exactly once."""
    (row,) = status(job.address)["data"]
    assert (row["committed"], row["dropped"], row["duplicates"]) == (row["total"], 0, 0)
