"""What is to survive the end of this server: the last snapshot or a complete log, and the file
of --save.
"""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from pscommon.core.errors import NotSavedError, PSError
from pscommon.system.small_files import write_whole
from psserver.shard.final_weights import write_final_weights

if TYPE_CHECKING:
    from psserver.coordinator.service import CoordinatorService

NOT_SAVED_FILE = "PS_NOT_SAVED_FILE"
"""Where shard 0 tells ps-run why the final weights are not on the disk; empty where they are.
The exit code does not tell where a signal has ended the server."""

log = logging.getLogger("psserver")


def save_final_state(hub: "CoordinatorService") -> str:
    """Write it; return why something is missing, or nothing. A job without weights has nothing
    to save.
    """
    coordinator = hub.snapshots.coordinator
    if not coordinator.begun or coordinator.model is None:
        return ""
    missing = hub.fleet.missing
    problems = [hub.lost_data_dir]
    if hub.archive.enabled:
        problems.append(
            _kept(hub, f"a shard is missing: {missing}" if missing else hub.snapshots.last())
        )
    if hub.config.save is not None and missing:
        problems.append(f"--save {hub.config.save}: a shard is missing: {missing}")
    elif hub.config.save is not None:
        try:
            addresses = hub.fleet.addresses
            write_final_weights(hub.engine, addresses, hub.job, coordinator.model, hub.config.save)
            log.info(
                "weights written",
                extra={"file": str(hub.config.save), "version": hub.engine.version},
            )
        except NotSavedError as error:
            problems.append(str(error))
    text = "; ".join(filter(None, problems))
    if path := os.environ.get(NOT_SAVED_FILE):
        try:
            write_whole(Path(path), text)
        except OSError as error:
            log.warning("ps-run cannot be told what is not saved", extra={"problem": str(error)})
    return text


def _kept(hub: "CoordinatorService", problem: str) -> str:
    """problem: why there is no last snapshot; empty where there is one. Nothing is lost where
    logs hold the rest.
    """
    if not problem:
        return ""
    if hub.snapshots.is_logged:
        log.warning("no last snapshot; the log holds all updates", extra={"problem": problem})
        return ""
    newest = hub.archive.newest_version
    held = (
        f"the newest snapshot is of version {newest}"
        if newest is not None
        else "there is no snapshot"
    )
    return f"version {hub.version} is not saved, and {held}: {problem}"


def conclude(failure: PSError | None, not_saved: str, code: int) -> int:
    """The exit code of a server that has ended. Raises why the job failed, or else NotSavedError.

    code: 0, or that of the signal which has ended it; this one stays.
    """
    if not_saved and (failure is not None or code):
        log.error("the final weights are not saved", extra={"problem": not_saved})
    if failure is not None:
        raise failure
    if not_saved and not code:
        raise NotSavedError(not_saved)
    return code
