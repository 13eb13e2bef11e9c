"""Temporary folders of runs; the next run removes those of killed runs."""

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from pscommon.system.process_id import has_ended, process_id

OWNER = "owner"
"""File that names the process that will remove the folder; a retained folder has none."""


def make_folder(prefix: str) -> Path:
    """Remove the folders of killed processes; create and return a new temporary folder."""
    remove_stale(prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    (folder / OWNER).write_text(process_id())
    return folder


def remove_stale(prefix: str) -> None:
    """Remove this user's folders whose processes have certainly ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError, ValueError):
            is_own = folder.lstat().st_uid == os.geteuid() and not folder.is_symlink()
            if is_own and has_ended((folder / OWNER).read_text()):
                shutil.rmtree(folder, ignore_errors=True)
