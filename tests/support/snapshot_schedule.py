"""Trainings that wait for each snapshot."""

from collections.abc import Callable

from pscommon.settings.values import SnapshotEvery
from psworker import Job
from tests.support.workers import (
    snapshots,
    until,
)

EVERY_5_STEPS = SnapshotEvery(steps=5)


def wait_for_snapshots(address: str) -> Callable[[Job], None]:
    """Return a function of a step that waits for the snapshot of its version.

    Servers write one snapshot at a time; without the wait a small training would skip some.
    """

    def wait(job: Job) -> None:
        if job.rank == 0 and job.version % 5 == 0:
            until(lambda: job.version in snapshots(address), f"a snapshot of version {job.version}")

    return wait
