"""Temporary folders of runs. That of a run which was killed is removed when the next one starts."""

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from pscommon.system.process_id import has_ended, process_id

OWNER = "owner"
"""File in a folder that names the process which will remove it; a folder that is kept for its
user has none.
"""


def make_folder(prefix: str) -> Path:
    """Return a new folder in the system's temporary one, after removing those that killed
    processes left there.
    """
    remove_stale(prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    (folder / OWNER).write_text(process_id())
    return folder


def remove_stale(prefix: str) -> None:
    """Remove this user's folders whose processes have ended for certain."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError, ValueError):
            is_own = folder.lstat().st_uid == os.geteuid() and not folder.is_symlink()
            if is_own and has_ended((folder / OWNER).read_text()):
                shutil.rmtree(folder, ignore_errors=True)
