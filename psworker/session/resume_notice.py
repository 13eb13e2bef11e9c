"""What a run is told that resumed a job which an earlier run had finished."""

import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pscommon.core.errors import PSError

if TYPE_CHECKING:
    from psworker.job import Job

UNDER_PS_RUN = "PS_WORKER_ATTEMPT"
"""Set for the workers of ps-run, which tells its user itself."""

log = logging.getLogger("psworker")


def nothing_left(status: Mapping[str, Any]) -> str:
    """Return the line for a run that had nothing to train; empty where it had, or may have had.

    status: as GetStatus answers once the workers have gone through their loops.
    """
    resumed, version, loops = status.get("resumed"), status.get("version"), status.get("data")
    if (
        not resumed
        or resumed["version"] != version
        or not loops
        or not all(loop["ended"] for loop in loops)
    ):
        return ""
    done = f"{resumed['steps']} steps, {resumed['samples']} samples"
    return (
        f"nothing is left to train: job {status['job']} was finished before, at version {version} "
        f"({done}). "
        "To train on, give the script more epochs; to start over, use `--resume never` or another "
        "--data-dir"
    )


def tell_finished(job: "Job") -> None:
    """As a worker closes its job: the first one of a run for which nothing was left says so."""
    if (
        job.stats.steps
        or job.rank
        or job.stopping
        or not job.first_version
        or UNDER_PS_RUN in os.environ
    ):
        return
    with suppress(PSError):
        if line := nothing_left(job.client.status()):
            log.warning(line)
