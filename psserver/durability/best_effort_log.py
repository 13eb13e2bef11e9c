"""A log on disk that training does not depend on: if it cannot be written, training goes on."""

import errno
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from pscommon.core.errors import SnapshotError
from pscommon.wal.log import Fsync, LogDamagedError, Record, WriteAheadLog

Raw = tuple[int, bytes, Sequence[memoryview]]

log = logging.getLogger("psserver")


def segment(version: int, number: int) -> str:
    """Return the name of the number-th segment begun at a version: names sort by version."""
    return f"{version:012d}-{number:04d}"


class BestEffortLog:
    """A WriteAheadLog whose write failures are logged and reported, not raised.

    on_failure: called with the name of the errno.
    whole: everything appended since the last `begin` is on disk.
    broken: something since the last snapshot is missing, after a disk failure. It ends with a
        snapshot that was cut while the log could be written again.

    Raises SnapshotError if the log cannot be read: `clear` could otherwise delete the only state of
    a job.
    """

    def __init__(self, folder: Path, fsync: Fsync, on_failure: Callable[[str], None]) -> None:
        try:
            self._log = WriteAheadLog(folder, fsync)
        except OSError as error:
            remedy = "; start the server as the owner of these files, or chown them to its user"
            why = f"{error.strerror}{remedy if isinstance(error, PermissionError) else ''}"
            raise SnapshotError(f"cannot read the log in {folder}: {why}") from error
        self._folder = folder
        self._on_failure = on_failure
        self._logged_errno = 0  # errno of the lasting failure, logged once; 0: none
        self.whole = self.broken = False
        self._writable_since: int | None = None  # version from which on everything is on disk again
        self._is_cleared = False
        self._is_closed = False

    @property
    def nbytes(self) -> int:
        """Bytes of the current segment."""
        return self._log.nbytes

    def append(self, kind: int, header: bytes, payload: Sequence[memoryview] = ()) -> None:
        """Append a record; does nothing after a failure, until the next `begin`."""
        if not self.whole:
            return
        try:
            self._log.append(kind, header, payload)
        except OSError as error:
            self._handle_failure(error)

    def begin(self, version: int, records: Iterable[Raw]) -> None:
        """Begin a segment, from which on the log is whole. Does nothing after `close`."""
        if self._is_closed:
            return
        try:
            number = sum(name.startswith(f"{version:012d}-") for name in self._log.segments())
            self._log.begin(segment(version, number), records)
        except OSError as error:
            self._handle_failure(error)
        else:
            self._logged_errno = 0
            if self.broken and self._writable_since is None:
                log.info("the log can be written again", extra={"folder": str(self._folder)})
                self._writable_since = version
            self.whole, self.broken = True, self.broken and not self._is_cleared
            self._is_cleared = False

    def _handle_failure(self, error: OSError) -> None:
        self.whole, self.broken, self._writable_since = False, True, None
        self._on_failure(errno.errorcode.get(error.errno or 0, "other"))
        with suppress(OSError):  # left empty by a segment that could not be written
            self._folder.rmdir()
        if self._logged_errno != (error.errno or -1):
            self._logged_errno = error.errno or -1
            text = "the log cannot be written; training goes on without it until the next snapshot"
            log.error(text, extra={"folder": str(self._folder), "problem": str(error)})

    def since(self, version: int | None) -> Iterator[Record]:
        """Yield all records since the snapshot of this version; None: there is no snapshot.

        A segment begins with all state that a snapshot lacks. So only the last segment begun at the
        version is read: the disk may have failed in earlier ones. Raises LogDamagedError or
        OSError.
        """
        names = self._log.segments()
        if version is not None:
            names = [name for name in names if name >= segment(version, 0)]
            at_version = [name for name in names if name.startswith(f"{version:012d}-")]
            names = names[max(0, len(at_version) - 1) :]
        for name in names:
            yield from self._read_segment(name)

    def _read_segment(self, name: str) -> Iterator[Record]:
        """Yield a segment's records. It never is empty: records are on disk before it gets its
        name.
        """
        empty = True
        for record in self._log.read(name):
            empty = False
            yield record
        if empty:
            raise LogDamagedError(self._folder / name, 0, "it has no complete record")

    def retire(self, version: int) -> None:
        """Remove segments from before this version: a complete snapshot of it exists."""
        if self._writable_since is not None and version >= self._writable_since:
            self.broken, self._writable_since = False, None
        try:
            self._log.retire(segment(version, 0))
        except OSError as error:
            log.warning("cannot remove old segments of the log", extra={"problem": str(error)})

    def clear(self) -> None:
        """Remove all segments; `begin` comes next."""
        self.whole, self._is_cleared = False, True
        try:
            self._log.clear()
        except OSError as error:
            self._handle_failure(error)
            self._is_cleared = False

    def close(self) -> None:
        self.whole, self._is_closed = False, True
        try:
            self._log.close()
        except OSError as error:
            self._handle_failure(error)
