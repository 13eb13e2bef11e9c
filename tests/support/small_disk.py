"""A small disk that can be filled, freed and made read-only: a tmpfs mounted in a context."""

import errno
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

FILLER = "filler"
BLOCK = bytes(1 << 16)


def missing(folder: Path) -> str:
    """Return why a small disk cannot be mounted here; empty if it can. folder: place to try it."""
    if os.geteuid() != 0:
        return "needs root to mount a tmpfs"
    if not (shutil.which("mount") and shutil.which("umount")):
        return "needs mount and umount"
    try:
        with SmallDisk(folder / "tried", 1 << 20):
            return ""
    except RuntimeError as error:
        return str(error)


class SmallDisk:
    """A mounted tmpfs. path: mount point, created if needed; nbytes: size.

    RuntimeError if the system forbids the mount.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path = path
        self._nbytes = nbytes

    def __enter__(self) -> Self:
        self.path.mkdir(parents=True, exist_ok=True)
        _run("mount", "-t", "tmpfs", "-o", f"size={self._nbytes},mode=0700", "none", str(self.path))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # lazy: open files do not prevent the unmount
        _run("umount", "--lazy", str(self.path))

    @property
    def free_bytes(self) -> int:
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def fill(self, leave: int = 0) -> None:
        """Fill the disk up to `leave` free bytes. Space that others free later needs another
        call.
        """
        with open(self.path / FILLER, "ab", buffering=0) as filler:
            try:
                while (free := self.free_bytes - leave) > 0:
                    filler.write(BLOCK[:free])
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    def free(self) -> None:
        """Release the filled space. Can be repeated."""
        (self.path / FILLER).unlink(missing_ok=True)

    def read_only(self) -> None:
        """Make every write fail with EROFS. RuntimeError while a file is open for writing."""
        _run("mount", "-o", "remount,ro", str(self.path))

    def writable(self) -> None:
        _run("mount", "-o", "remount,rw", str(self.path))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
