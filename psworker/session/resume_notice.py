"""The notice for a run that resumes a job which an earlier run finished."""

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pscommon.core.errors import PSError
from pscommon.telemetry.logs import get_logger
from psworker.session.session import Session

UNDER_PS_RUN = "PS_WORKER_ATTEMPT"
"""Set for the workers of ps-run, which prints the notice itself."""

log = get_logger(__name__)


def nothing_left(status: Mapping[str, Any]) -> str:
    """Return the notice for a run that had nothing to train; empty for any other run.

    status: The job's status after the workers have passed through their loops.
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
        f"({done}). Try: more epochs in the script; to start over: `--resume never` or another "
        "`--data-dir`"
    )


def log_if_finished(session: Session, rank: int, first_version: int) -> None:
    """Log once per run that nothing was left to train; call it when a worker closes its job.

    first_version: The job's version when this worker joined.
    """
    if (
        session.stats.steps
        or rank
        or session.stopping
        or not first_version
        or UNDER_PS_RUN in os.environ
    ):
        return
    with suppress(PSError):
        if line := nothing_left(session.client.status()):
            log.warning("training_already_finished", problem=line)
