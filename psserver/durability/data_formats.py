"""Refusal of a data directory that a newer release has written."""

from pathlib import Path

from pscommon.core.errors import SnapshotError
from pscommon.core.formats import check_file_format
from pscommon.snapshot.manifest import FORMAT, MANIFEST, format_of_manifest
from pscommon.wal.format import MAGIC, format_of_segment

HEAD_BYTES = 4096
"""Bytes at the start of a file that contain its format number."""


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
