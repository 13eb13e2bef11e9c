"""Refusal of a data directory that a newer release has written, or that other users can write."""

import grp
import os
import pwd
import stat
from pathlib import Path

from pscommon.core.errors import InvalidRequestError, SnapshotError
from pscommon.core.formats import check_file_format
from pscommon.snapshot.manifest import FORMAT, MANIFEST, format_of_manifest
from pscommon.telemetry.logs import get_logger
from pscommon.wal.format import MAGIC, format_of_segment

HEAD_BYTES = 4096
"""Bytes at the start of a file that contain its format number."""

log = get_logger(__name__)


def check_data_dir_mode(data_dir: Path, is_secured: bool) -> None:
    """Refuse a data directory that other users can write, or warn of it.

    They could change the weights. A group may write if root has let it, as Kubernetes mounts
    volumes (fsGroup), or if it is the user's own: some systems make directories so that it can.

    Args:
        data_dir: The directory. It exists.
        is_secured: The server uses TLS or tokens, so a warning is not enough.

    Raises:
        InvalidRequestError: Other users can write it, and the server is secured.
    """
    facts = data_dir.stat()
    mode, owner = stat.S_IMODE(facts.st_mode), facts.st_uid
    is_own_group = owner == 0 or _is_private(facts.st_gid, owner)
    writers = stat.S_IWOTH if is_own_group else stat.S_IWOTH | stat.S_IWGRP
    if owner in (0, os.geteuid()) and not mode & writers:
        return
    problem = f"its mode is {mode:04o} and its owner is user {owner}, so other users can write it"
    remedy = f"chmod go-w {data_dir}"
    if owner not in (0, os.geteuid()):
        remedy = "a directory of the user that runs the server"
    if is_secured:
        raise InvalidRequestError(f"data directory {data_dir} refused: {problem}. Try: {remedy}")
    log.warning("data_dir_writable", path=str(data_dir), problem=problem, remedy=remedy)


def _is_private(group: int, user: int) -> bool:
    """Return whether a group is that of one user alone, who has the same name."""
    try:
        return grp.getgrgid(group).gr_name == pwd.getpwuid(user).pw_name
    except KeyError:
        return False


def check_data_formats(data_dir: Path, resume: str | int) -> None:
    """Check all snapshots and logs before the server uses any of them.

    Without this check the server would take a newer snapshot for a damaged one. It would continue
    from an older one, and lose updates. With --resume never the server uses none of these files.

    Raises FormatError if a file has a newer format, SnapshotError if it cannot be read.
    """
    if resume == "never":
        return
    for path in sorted(data_dir.glob(f"snapshots/*/{MANIFEST}")):
        if path.parent.name.isdecimal():  # skips snapshots that were set aside
            check_file_format(format_of_manifest(_head(path)), FORMAT, f"snapshot {path}")
    for path in sorted(data_dir.glob("log-*/*.log")):
        check_file_format(format_of_segment(_head(path)), MAGIC[-1], f"log {path}")


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(HEAD_BYTES)
    except FileNotFoundError:  # another server of the job has removed it
        return b""
    except OSError as error:
        raise SnapshotError(f"cannot read {path}: {error.strerror}") from error
