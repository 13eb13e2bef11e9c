"""Write-ahead log on disk: a record whose `append` has returned survives kill -9.

Theory of operation. A folder holds segments, <name>.log, and spares, <name>.spare. A segment is
written from start to end; `begin` creates the next one. Retired segments become spares, and
`begin` reuses a spare if there is one. Its pages are in the cache and its blocks are allocated, so
this is many times faster than a new file and needs no space. The file format, and why old bytes
in a spare are harmless: format.py.

States of the log: no segment (before `begin`, after `clear` and `close`), writing, broken.

- After a failed append the end of the segment is unknown: the log is broken.
- After a failed sync the kernel may have dropped the bytes, so another sync proves nothing: the
  log is broken.
- In a broken log appends resume only after `begin`. A failed `begin` changes nothing.

Invariants:

- A segment's name implies that its first records are on disk. A new segment is written and synced
  under a spare's name, then renamed; then the folder is synced.
- The folder is synced before a spare is overwritten. Otherwise a power failure could restore the
  old name with the new bytes.

Durability. A killed process loses no record in any mode. After a power failure, records whose
`append` has returned are:

- "always": all on disk;
- "everysec": on disk except for about the last second;
- "no": possibly lost; the end of a segment may be lost although the next segment is there.
"""

import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from pscommon.wal.format import Buffer, LogDamagedError, Record, RecordReader, checksum
from pscommon.wal.segment import LogFiles, LogSegment, LogWriteError, failed, views_of

__all__ = [
    "Fsync",
    "LogDamagedError",
    "LogFiles",
    "LogWriteError",
    "Record",
    "RecordReader",
    "WriteAheadLog",
]

Fsync = Literal["always", "everysec", "no"]

FirstRecords = Iterable[tuple[int, bytes, Sequence[Buffer]]]
"""Kind, header and payload of each record."""

SEGMENT, SPARE = ".log", ".spare"
SPARE_COUNT = 2
NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]*")
SYNC_INTERVAL_SECONDS = 1.0
"""Time between syncs for "everysec"."""


class WriteAheadLog:
    """Write-ahead log in one folder of segments; all methods are thread-safe.

    Appends are written completely, in order of the calls. The first `begin` creates the folder.
    Only one log may write to a folder at a time.

    Args:
        folder: The folder.
        fsync: When appends are synced.
        files: Disk operations; None: the real ones.

    Raises:
        OSError: A segment cannot be read. Clearing it would lose unknown records.
    """

    def __init__(self, folder: Path, fsync: Fsync, files: LogFiles | None = None) -> None:
        self.folder = folder
        self._fsync = fsync
        self._files = files or LogFiles()
        self._lock = threading.RLock()
        self._current: LogSegment | None = None
        self._made = False
        self._newest = max(self.segments(), default="")
        for name in self.segments():
            self._path(name, SEGMENT).open("rb").close()
        self._closed = threading.Event()
        self._syncer = threading.Thread(target=self._sync_often, name="log-sync", daemon=True)
        if fsync == "everysec":
            self._syncer.start()

    def begin(self, name: str, records: FirstRecords) -> None:
        """Create a segment with these first records, and sync it before it becomes the current one.

        Appends wait meanwhile.

        Args:
            name: Name of the segment; it sorts after all earlier ones.

        Raises:
            LogWriteError: Nothing has changed; appends continue in the previous segment unless it
                is broken.
            ValueError: The name does not sort after all earlier ones.
        """
        with self._lock:
            if not NAME.fullmatch(name) or name <= self._newest:
                raise ValueError(f"{name!r} is no name for the segment after {self._newest!r}")
            self._settle()
            with self._writing():
                segment = self._make(name, records)
            previous, self._current, self._newest = self._current, segment, name
            if previous:
                previous.close()

    def append(self, kind: int, header: bytes, payload: Sequence[Buffer] = ()) -> None:
        """Append a record; with fsync "always" it is on disk when this returns.

        header: Encoded metadata. payload: Data, in parts.

        Raises:
            LogWriteError: The write failed, or the log was broken before. The record may or may not
                be read later.
            ValueError: There is no segment: before the first `begin`, after `clear` or after
                `close`.
        """
        views = views_of(payload)
        check = checksum(header, views)
        with self._lock:
            if self._current is None:
                raise ValueError(f"the log in {self.folder} has no segment: begin one")
            segment = self._current
            end = segment.append(kind, header, views, check)
        if self._fsync == "always":
            segment.sync(end)

    def sync(self) -> None:
        """Sync everything appended to the current segment.

        Raises:
            LogWriteError: The sync failed.
        """
        if segment := self._current:
            segment.sync(segment.nbytes)

    @property
    def broken(self) -> str:
        """Why appends are refused until the next `begin`; empty if they are not."""
        segment = self._current
        return str(segment.failure) if segment and segment.failure else ""

    @property
    def nbytes(self) -> int:
        """Size of the current segment up to the end of its last record, in bytes."""
        segment = self._current
        return segment.nbytes if segment else 0

    def segments(self) -> list[str]:
        """Return the names of all segments on disk, ascending, including the current one.

        Raises:
            OSError: The folder cannot be read.
        """
        return self._names(SEGMENT)

    def read(self, name: str) -> RecordReader:
        """Return a reader of all complete records of a segment.

        After the last record the reader's `torn` is set if the end is torn. A segment that is
        retired meanwhile seems to end where its file has been overwritten.

        Raises:
            LogDamagedError: While reading: a valid record follows a damaged one.
        """
        return RecordReader(self._path(name, SEGMENT))

    def retire(self, before: str) -> None:
        """Retire the segments with smaller names: some files become spares, the rest is removed.

        After a power failure some of them may exist again.

        Raises:
            LogWriteError: Some of the segments are left.
        """
        with self._lock, self._writing():
            current = self._current.path.stem if self._current else ""
            self._drop([name for name in self.segments() if name < before and name != current])

    def clear(self) -> None:
        """Remove all segments; segment names may start again.

        Raises:
            LogWriteError: Some segments are left, the oldest ones; `begin` removes them.
        """
        with self._lock, self._writing():
            self._newest = ""
            if self._current:
                self._current.close()
                self._current = None
            if names := self.segments():
                self._drop(names[::-1])
                self._files.sync_folder(self.folder)

    def close(self) -> None:
        """Close the log; its segments stay. Idempotent.

        Raises:
            LogWriteError: The last sync failed.
        """
        self._closed.set()
        if self._syncer.ident is not None:
            self._syncer.join()
        with self._lock:
            try:
                self._settle()
            finally:
                if self._current:
                    self._current.close()
                self._current = None

    def _sync_often(self) -> None:
        while not self._closed.wait(SYNC_INTERVAL_SECONDS):
            with suppress(LogWriteError):  # the log is then broken, and the next append raises
                self.sync()

    def _settle(self) -> None:
        """Sync the current segment before the next one replaces it.

        A power failure then leaves no gap between them.
        """
        if self._current and self._fsync != "no" and not self._current.unsyncable:
            self._current.sync(self._current.nbytes)

    def _make(self, name: str, records: FirstRecords) -> LogSegment:
        """Return a new segment that is on disk; after a failure, remove all of it."""
        self._make_folder()
        self._remove_stray()
        spare, target = self._spare(name), self._path(name, SEGMENT)
        try:
            return self._fill(LogSegment(self._files, spare), target, records)
        except BaseException:
            # not kept as a spare: a bad disk block would fail each begin
            for path in (target, spare):
                with suppress(OSError):
                    self._files.remove(path)
            raise

    def _fill(
        self,
        segment: LogSegment,
        target: Path,
        records: FirstRecords,
    ) -> LogSegment:
        try:
            segment.start()
            for kind, header, payload in records:
                views = views_of(payload)
                segment.append(kind, header, views, checksum(header, views))
            segment.sync(segment.nbytes)
            segment.rename(target)
            self._files.sync_folder(self.folder)
        except BaseException:
            segment.close()
            raise
        return segment

    def _make_folder(self) -> None:
        """Create the folder, also if another process has removed it."""
        if not self._made or not self.folder.is_dir():
            self._files.make_folder(self.folder)
            self._files.sync_folder(self.folder.parent)
            self._made = True

    def _spare(self, name: str) -> Path:
        spares = self._names(SPARE)
        if not spares:
            return self._path(name, SPARE)
        self._files.sync_folder(self.folder)
        return self._path(spares[0], SPARE)

    def _remove_stray(self) -> None:
        """Remove segments that a failed `begin` or `clear` left behind."""
        for name in self.segments():
            if name > self._newest:
                self._files.remove(self._path(name, SEGMENT))

    def _drop(self, names: list[str]) -> None:
        for name in names:
            if len(self._names(SPARE)) < SPARE_COUNT:
                self._files.rename(self._path(name, SEGMENT), self._path(name, SPARE))
            else:
                self._files.remove(self._path(name, SEGMENT))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Convert an OSError of the body to a LogWriteError with a path."""
        try:
            yield
        except LogWriteError:
            raise
        except OSError as error:
            raise failed(error, self.folder) from error

    def _path(self, name: str, suffix: str) -> Path:
        return self.folder / (name + suffix)

    def _names(self, suffix: str) -> list[str]:
        try:
            return sorted(
                name.removesuffix(suffix)
                for name in os.listdir(self.folder)
                if name.endswith(suffix)
            )
        except FileNotFoundError:
            return []
