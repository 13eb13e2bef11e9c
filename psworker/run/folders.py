"""Folders of a run: its temporary folder, and the folder of its log files.

The next run removes the temporary folders of killed runs.
"""

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from pscommon.core.errors import InvalidRequestError
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


def remove_folder(folder: Path, keep_logs: bool) -> None:
    """Remove the run's folder, except its log files if `keep_logs`."""
    if not keep_logs:
        shutil.rmtree(folder)
        return
    for path in folder.iterdir():
        if path.suffix != ".log":
            path.unlink()


def log_folder(settings: dict[str, Any], folder: Path) -> Path:
    """Return the folder for log files: --log-dir, which is created, or the run's own folder."""
    wanted: Path | None = settings["log_dir"]
    if wanted is None:
        return folder
    try:
        wanted.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequestError(f"`--log-dir {wanted}` is not valid: {error.strerror}") from error
    counts = {"s": settings["servers"], "w": settings["workers"]}
    for name in (
        f"{kind}{number}.log" for kind, count in counts.items() for number in range(count)
    ):
        if (wanted / name).is_dir():
            raise InvalidRequestError(
                f"`--log-dir {wanted}` is not valid: {name} is a folder, but a log file needs this "
                "name. Try: another folder"
            )
    return wanted
