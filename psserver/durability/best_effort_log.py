"""A write-ahead log that training does not depend on: training continues if a write fails."""

import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from pscommon.core.errors import SnapshotError
from pscommon.telemetry.logs import get_logger
from pscommon.wal.log import Fsync, LogDamagedError, Record, WriteAheadLog

Raw = tuple[int, bytes, Sequence[memoryview]]

log = get_logger(__name__)


def segment(version: int, number: int) -> str:
    """Return the name of the number-th segment of a version; names sort by version."""
    return f"{version:012d}-{number:04d}"


class BestEffortLog:
    """A WriteAheadLog whose write failures are logged and reported, not raised.

    Theory of operation. States of the log:

        whole       everything appended since the last `begin` is on disk
        not whole   after a failure, or before the first `begin`; `append` does nothing

    A write failure ends "whole" and sets `broken`; a successful `begin` restores "whole". `broken`
    ends with a complete snapshot that was cut after writes worked again, or with `clear` and
    `begin`.

    on_failure: called with the name of the errno.
    whole: everything appended since the last `begin` is on disk.
    broken: some record since the last snapshot is missing, after a disk failure.

    Raises:
        SnapshotError: The log cannot be read; `clear` could otherwise delete the only state of a
            job.
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
        self.is_complete = self.is_broken = False
        self._writable_since: int | None = None  # version after which writes work again
        self._is_cleared = False
        self._is_closed = False

    @property
    def nbytes(self) -> int:
        """Bytes of the current segment."""
        return self._log.nbytes

    def append(self, kind: int, header: bytes, payload: Sequence[memoryview] = ()) -> None:
        """Append a record; do nothing after a failure, until the next `begin`."""
        if not self.is_complete:
            return
        try:
            self._log.append(kind, header, payload)
        except OSError as error:
            self._handle_failure(error)

    def begin_segment(self, version: int, records: Iterable[Raw]) -> None:
        """Begin a segment, from which on the log is whole. Do nothing after `close`."""
        if self._is_closed:
            return
        try:
            number = sum(name.startswith(f"{version:012d}-") for name in self._log.segments())
            self._log.begin(segment(version, number), records)
        except OSError as error:
            self._handle_failure(error)
        else:
            self._logged_errno = 0
            if self.is_broken and self._writable_since is None:
                log.info("log_writable_again", folder=str(self._folder))
                self._writable_since = version
            self.is_complete, self.is_broken = True, self.is_broken and not self._is_cleared
            self._is_cleared = False

    def _handle_failure(self, error: OSError) -> None:
        self.is_complete, self.is_broken, self._writable_since = False, True, None
        self._on_failure(errno.errorcode.get(error.errno or 0, "other"))
        with suppress(OSError):  # empty if no segment could be written
            self._folder.rmdir()
        if self._logged_errno != (error.errno or -1):
            self._logged_errno = error.errno or -1
            log.error(
                "log_unwritable",
                folder=str(self._folder),
                problem=str(error),
                effect="training continues without this log until the next snapshot",
            )

    def records_since(self, version: int | None) -> Iterator[Record]:
        """Yield all records since the snapshot of this version; None: there is no snapshot.

        A segment begins with all state that a snapshot lacks. So of the segments begun at the
        version only the last one is read: earlier ones may be incomplete after a disk failure.

        Raises:
            LogDamagedError: A segment is damaged.
            OSError: A segment cannot be read.
        """
        names = self._log.segments()
        if version is not None:
            names = [name for name in names if name >= segment(version, 0)]
            at_version = [name for name in names if name.startswith(f"{version:012d}-")]
            names = names[max(0, len(at_version) - 1) :]
        for name in names:
            yield from self._read_segment(name)

    def _read_segment(self, name: str) -> Iterator[Record]:
        """Yield a segment's records.

        An empty segment is damaged: its first records are on disk before it gets its name.
        """
        empty = True
        for record in self._log.read(name):
            empty = False
            yield record
        if empty:
            raise LogDamagedError(self._folder / name, 0, "it has no complete record")

    def remove_before(self, version: int) -> None:
        """Remove segments older than this version, of which a complete snapshot exists."""
        if self._writable_since is not None and version >= self._writable_since:
            self.is_broken, self._writable_since = False, None
        try:
            self._log.retire(segment(version, 0))
        except OSError as error:
            log.warning("log_segments_not_removed", problem=str(error))

    def clear(self) -> None:
        """Remove all segments; the caller calls `begin` next."""
        self.is_complete, self._is_cleared = False, True
        try:
            self._log.clear()
        except OSError as error:
            self._handle_failure(error)
            self._is_cleared = False

    def close(self) -> None:
        self.is_complete, self._is_closed = False, True
        try:
            self._log.close()
        except OSError as error:
            self._handle_failure(error)
