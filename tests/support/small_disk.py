"""A disk of a few MB that can be filled, freed and made read-only: a tmpfs, mounted while the
`with` lasts.
"""

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
    """Why there can be no small disk here; empty if there can. folder: where one may be tried."""
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
    """path: where it is mounted, made if need be. nbytes: its size. RuntimeError where the
    system forbids it.
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
        # lazy: a process that still has a file there does not keep the mount
        _run("umount", "--lazy", str(self.path))

    @property
    def free_bytes(self) -> int:
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def fill(self, leave: int = 0) -> None:
        """Until no more than `leave` bytes are free. What others free meanwhile is theirs: call
        it again.
        """
        with open(self.path / FILLER, "ab", buffering=0) as filler:
            try:
                while (free := self.free_bytes - leave) > 0:
                    filler.write(BLOCK[:free])
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    def free(self) -> None:
        """What `fill` took is there again. Harmless to repeat."""
        (self.path / FILLER).unlink(missing_ok=True)

    def read_only(self) -> None:
        """Every write fails with EROFS. RuntimeError while somebody has a file there open for
        writing.
        """
        _run("mount", "-o", "remount,ro", str(self.path))

    def writable(self) -> None:
        _run("mount", "-o", "remount,rw", str(self.path))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
