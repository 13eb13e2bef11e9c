"""What must be saved before this server ends: the last snapshot or a complete log, and the file
of --save.
"""

import os
from pathlib import Path

from pscommon.core.errors import NotSavedError, PSError
from pscommon.snapshot import Manifest
from pscommon.system.small_files import replace_file
from pscommon.telemetry.logs import get_logger
from psserver.coordinator.snapshot_jobs import SnapshotScheduler
from psserver.core.job.job_state import JobState
from psserver.core.servers.shard_directory import ShardDirectory
from psserver.durability.snapshots import SnapshotManager
from psserver.peers.final_weights import write_final_weights
from psserver.shard.engine import ShardEngine

NOT_SAVED_FILE = "PS_NOT_SAVED_FILE"
"""File in which shard 0 tells ps-run why the final weights are not saved; empty if they are.

A signal's exit code cannot tell this.
"""

log = get_logger(__name__)


def save_final_state(
    job: str,
    save: Path | None,
    engine: ShardEngine,
    directory: ShardDirectory[Manifest],
    scheduler: SnapshotScheduler,
    snapshots: SnapshotManager,
    lost_data_dir: str,
) -> str:
    """Write the last snapshot and the file of --save. A job without weights has neither.

    save: The file for the final weights; None: none is wanted.
    lost_data_dir: Why this server continues without its data directory; empty otherwise.

    Returns why something is not saved; empty if everything is.
    """
    coordinator = scheduler.coordinator
    if not coordinator.job.begun or coordinator.job.model is None:
        return ""
    missing = directory.missing
    lost_weights = _lost_weights(coordinator.job)
    problems = [lost_data_dir, lost_weights]
    if snapshots.enabled and not lost_weights:
        problem = f"a shard is missing: {missing}" if missing else scheduler.last()
        problems.append(_last_snapshot_problem(scheduler, snapshots, problem))
    if save is not None and missing:
        problems.append(f"--save {save}: a shard is missing: {missing}")
    elif save is not None:
        try:
            addresses = directory.addresses
            write_final_weights(engine.live, addresses, job, coordinator.job.model, save)
            version = engine.live.machine.weights_version
            log.info("weights_written", file=str(save), version=version)
        except NotSavedError as error:
            problems.append(str(error))
    text = "; ".join(filter(None, problems))
    if path := os.environ.get(NOT_SAVED_FILE):
        try:
            replace_file(Path(path), text)
        except OSError as error:
            log.warning("result_file_unwritable", problem=str(error))
    return text


def _lost_weights(job: JobState) -> str:
    """Return that the servers lack the newest weights; empty if they have them.

    Workers that leave send theirs (policy allreduce): those that had the newest ones were lost.
    """
    if job.has_newest_weights:
        return ""
    return job.reduction.describe_loss(job.version)


def _last_snapshot_problem(
    scheduler: SnapshotScheduler, snapshots: SnapshotManager, problem: str
) -> str:
    """Return what is lost without a last snapshot; empty if the logs hold all updates.

    problem: Why there is no last snapshot; empty if there is one.
    """
    if not problem:
        return ""
    if scheduler.is_logged:
        log.warning("last_snapshot_missing", problem=problem)
        return ""
    saved = "there is no snapshot"
    if snapshots.newest_version is not None:
        saved = f"the newest snapshot is of version {snapshots.newest_version}"
    return f"version {scheduler.coordinator.job.version} is not saved, and {saved}: {problem}"


def conclude(failure: PSError | None, not_saved: str, code: int) -> int:
    """Return the exit code of a server that has ended.

    code: 0, or the code of the signal that ended the server; that code is kept.

    Raises the error with which the job failed, or NotSavedError if it did not fail and its final
    state is not saved.
    """
    if not_saved and (failure is not None or code):
        log.error("final_weights_not_saved", problem=not_saved)
    if failure is not None:
        raise failure
    if not_saved and not code:
        raise NotSavedError(not_saved)
    return code
