"""A log on disk that training does not depend on: where it cannot be written, training goes on
without it, loudly.
"""

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
    """The name of the number-th segment that was begun at a version: names sort by version."""
    return f"{version:012d}-{number:04d}"


class BestEffortLog:
    """A WriteAheadLog whose failures are told instead of raised. on_failure is called with the
    errno's name. SnapshotError where it cannot be read: what cannot be gone on from is cleared,
    and that may be all that there is of a job.

    whole: all that was appended since the last `begin` is there. broken: something since the
    last snapshot is not, for the disk failed; over with a snapshot from which on all is there.
    """

    def __init__(self, folder: Path, fsync: Fsync, on_failure: Callable[[str], None]) -> None:
        try:
            self._log = WriteAheadLog(folder, fsync)
        except OSError as error:
            remedy = "; start the server as the user whose files these are, or give them to its own (chown -R)"
            why = f"{error.strerror}{remedy if isinstance(error, PermissionError) else ''}"
            raise SnapshotError(f"cannot read the log in {folder}: {why}") from error
        self._folder = folder
        self._on_failure = on_failure
        self._told = 0  # errno of the trouble that lasts, which is told once; 0: none
        self.whole = self.broken = False
        self._mended: int | None = None  # the version from which on all is there again
        self._cleared = False
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Of the current segment."""
        return self._log.nbytes

    def append(self, kind: int, header: bytes, payload: Sequence[memoryview] = ()) -> None:
        """Does nothing where the log is broken: the next `begin` may mend it."""
        if not self.whole:
            return
        try:
            self._log.append(kind, header, payload)
        except OSError as error:
            self._failed(error)

    def begin(self, version: int, records: Iterable[Raw]) -> None:
        """A new segment, from which on the log is whole. Nothing comes after `close`."""
        if self._closed:
            return
        try:
            number = sum(name.startswith(f"{version:012d}-") for name in self._log.segments())
            self._log.begin(segment(version, number), records)
        except OSError as error:
            self._failed(error)
        else:
            self._told = 0
            if self.broken and self._mended is None:
                log.info("the log can be written again", extra={"folder": str(self._folder)})
                self._mended = version
            self.whole, self.broken = True, self.broken and not self._cleared
            self._cleared = False

    def _failed(self, error: OSError) -> None:
        self.whole, self.broken, self._mended = False, True, None
        self._on_failure(errno.errorcode.get(error.errno or 0, "other"))
        with suppress(OSError):  # made for a segment that could not be written
            self._folder.rmdir()
        if self._told != (error.errno or -1):
            self._told = error.errno or -1
            text = "the log cannot be written; training goes on without it until the next snapshot"
            log.error(text, extra={"folder": str(self._folder), "problem": str(error)})

    def since(self, version: int | None) -> Iterator[Record]:
        """All records since a snapshot of this version; None: there is no snapshot.
        LogDamagedError, OSError.

        A segment begins with all that a snapshot does not hold, so the last one that was begun
        at the version counts: the disk may have failed in those before it.
        """
        names = self._log.segments()
        if version is not None:
            names = [name for name in names if name >= segment(version, 0)]
            at_version = [name for name in names if name.startswith(f"{version:012d}-")]
            names = names[max(0, len(at_version) - 1) :]
        for name in names:
            yield from self._some(name)

    def _some(self, name: str) -> Iterator[Record]:
        """The records of a segment, which is never without any: they are on the disk before it
        gets its name.
        """
        empty = True
        for record in self._log.read(name):
            empty = False
            yield record
        if empty:
            raise LogDamagedError(self._folder / name, 0, "there is no whole record in it")

    def retire(self, version: int) -> None:
        """There is a snapshot of this version: what was written before it is not needed any
        more.
        """
        if self._mended is not None and version >= self._mended:
            self.broken, self._mended = False, None
        try:
            self._log.retire(segment(version, 0))
        except OSError as error:
            log.warning("cannot remove old segments of the log", extra={"problem": str(error)})

    def clear(self) -> None:
        """Its history is over; `begin` comes next."""
        self.whole, self._cleared = False, True
        try:
            self._log.clear()
        except OSError as error:
            self._failed(error)
            self._cleared = False

    def close(self) -> None:
        self.whole, self._closed = False, True
        try:
            self._log.close()
        except OSError as error:
            self._failed(error)
