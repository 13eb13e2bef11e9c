"""One segment file while it is written, and the disk operations that this needs."""

import errno
import os
import secrets
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from pscommon.wal.format import NONCE_BYTES, Buffer, Head, end_mark, pack_file_head, pack_head

IOV_MAX = os.sysconf("SC_IOV_MAX")


class LogWriteError(OSError):
    """The log could not be written or synced; errno, strerror and filename say why."""


class LogFiles:
    """The disk operations, one method each, so that a test can make each of them fail.

    Every method may raise OSError.
    """

    def make_folder(self, path: Path) -> None:
        """Create a folder that only its owner can access. Idempotent."""
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def open(self, path: Path) -> int:
        """Return a descriptor for writing. Create the file if necessary, and keep its bytes."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def write(self, descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        """Return the number of bytes that the kernel accepted, possibly fewer than given.

        At most IOV_MAX views.
        """
        return os.pwritev(descriptor, views, offset)

    def sync(self, descriptor: int) -> None:
        """Sync a file's bytes to disk."""
        os.fdatasync(descriptor)

    def sync_folder(self, path: Path) -> None:
        """Sync a folder's directory entries to disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        source.replace(target)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)


class LogSegment:
    """A file that is written from its start, over its old bytes.

    One thread at a time may append; any thread may sync meanwhile.

    path: path of the file.
    nbytes: end of the last complete record, in bytes.
    failure: the error that broke the segment; None if there is none.
    unsyncable: whether a sync failed, so that no later sync proves anything.

    Raises:
        OSError: The file cannot be opened.
    """

    def __init__(self, files: LogFiles, path: Path) -> None:
        self.path = path
        self.nbytes = 0
        self.failure: LogWriteError | None = None
        self.unsyncable = False
        self._files = files
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._synced = 0
        self._syncing = threading.Lock()
        self._descriptor = files.open(path)

    def start(self) -> None:
        """Write the file head, before the first record."""
        self._write([pack_file_head(self._nonce)])

    def append(self, kind: int, header: bytes, payload: Sequence[memoryview], check: int) -> int:
        """Append a record and return its end in the file, in bytes.

        Raises:
            LogWriteError: The write failed, or the segment was broken before.
        """
        if self.failure:
            raise failed(self.failure, self.path)
        head = Head(kind, len(header), sum(view.nbytes for view in payload), check)
        self._write([pack_head(self._nonce, head), header, *payload])
        return self.nbytes

    def sync(self, end: int) -> None:
        """Sync the bytes up to `end`, together with everything written so far.

        So threads share one sync.

        Raises:
            LogWriteError: This sync failed, or an earlier one.
        """
        with self._syncing:
            if self._synced >= end:
                return
            if self.unsyncable and self.failure:
                raise failed(self.failure, self.path)
            if self._descriptor < 0:
                return
            written = self.nbytes
            try:
                self._files.sync(self._descriptor)
            except OSError as error:
                self.unsyncable = True
                self.failure = failed(error, self.path)
                raise self.failure from error
            self._synced = written

    def rename(self, target: Path) -> None:
        self._files.rename(self.path, target)
        self.path = target

    def close(self) -> None:
        """Close the file after a running sync. Idempotent."""
        with self._syncing:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def _write(self, buffers: Sequence[Buffer]) -> None:
        """Write all buffers behind the last record, and the end mark behind them."""
        remaining, offset = views_of([*buffers, end_mark(self._nonce)]), self.nbytes
        end = offset + sum(view.nbytes for view in remaining) - NONCE_BYTES
        try:
            while remaining:
                done = self._files.write(self._descriptor, remaining[:IOV_MAX], offset)
                if done <= 0:
                    raise OSError(errno.EIO, "the system wrote nothing")
                remaining, offset = _behind(remaining, done), offset + done
        except OSError as error:
            self.failure = failed(error, self.path)
            raise self.failure from error
        self.nbytes = end


def failed(error: OSError, path: Path) -> LogWriteError:
    """Return the error as a LogWriteError that names a path."""
    number = error.errno or errno.EIO
    return LogWriteError(number, error.strerror or os.strerror(number), error.filename or str(path))


def views_of(buffers: Iterable[Buffer]) -> list[memoryview]:
    """Return the buffers as byte views, without empty ones, which cannot be cast."""
    return [view.cast("B") for buffer in buffers if (view := memoryview(buffer)).nbytes]


def _behind(views: list[memoryview], done: int) -> list[memoryview]:
    """Return what is left after the first `done` bytes."""
    for index, view in enumerate(views):
        if done < view.nbytes:
            return [view[done:], *views[index + 1 :]]
        done -= view.nbytes
    return []
