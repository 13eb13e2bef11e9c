"""Lock of a data directory: one server per shard and directory."""

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from pscommon.core.errors import InvalidRequestError, TakenError


class DataDirLock:
    """Context manager that locks <data_dir>/shard-<i>.lock; creates the directory if necessary.

    Shards may share a directory. The kernel frees the lock when its process ends.

    path: the lock file.

    Raises:
        TakenError: On entry: another process has the lock; the message names it.
        InvalidRequestError: On entry: the directory cannot be used.
    """

    def __init__(self, data_dir: Path, shard: int) -> None:
        self.path = data_dir / f"shard-{shard}.lock"
        self._shard = shard
        self._descriptor = -1

    def __enter__(self) -> "DataDirLock":
        try:
            # no other user may write to it, whatever the umask
            self.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            while self._descriptor < 0:
                self._descriptor = self._try()
        except OSError as error:
            raise InvalidRequestError(self._refused(error)) from error
        # disk full: the lock is valid without the process number
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, f"{os.getpid()}\n".encode())
        return self

    def _refused(self, error: OSError) -> str:
        if error.errno == errno.ELOOP:  # the target may be another user's file
            problem = f"{self.path} is a symbolic link"
            return f"cannot lock shard {self._shard}: {problem}. Try: rm {self.path}"
        return f"cannot use data directory {self.path.parent}: {error.strerror}"

    def __exit__(self, *_: object) -> None:
        # unlink while locked: a process that opened this file detects that the path has changed;
        # a file that cannot be removed (another user's folder) is not locked afterwards
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = -1

    def _try(self) -> int:
        """Return the locked descriptor; -1 if the previous holder has just removed the file."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise TakenError(
                f"data directory {self.path.parent} is in use: process {holder} serves shard "
                f"{self._shard}. Try: stop it, or choose another `--data-dir`"
            ) from None
        except BaseException:
            os.close(descriptor)
            raise
        if self._is_current(descriptor):
            return descriptor
        os.close(descriptor)
        return -1

    def _is_current(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self.path.lstat())
        except FileNotFoundError:
            return False
