"""A log on disk: what `append` has returned for is read again after kill -9.

A folder holds segments, <name>.log, and spares, <name>.spare. A segment is written from its
start to its end; `begin` makes the next one. Files of segments that are not needed any more
become spares, and `begin` writes over a spare where there is one: its pages are in the cache and
its blocks on the disk, so this is many times faster than a new file, and needs no space. How a
file looks inside, and why old bytes in it do no harm: `record_format`.

**Order on the disk.** A new segment is written and synced while it is still called a spare, then renamed, then the
folder is synced. So a segment's name stands for a whole beginning. Before a spare is written over the folder is synced
too, or a power cut could bring back the old name with the new bytes.

**What fails.** After a failed append the segment's end is unknown: the log is `broken`, and only `begin` goes on. After
a failed sync the system may have dropped the bytes and forgotten, so another sync proves nothing: broken as well.
A `begin` that fails leaves all as it was.

**What `fsync` means.** A process that is killed loses nothing in any mode. A power cut loses nothing that `append` has
returned for with "always", about the last second of it with "everysec" and any of it with "no"; with "no" it may take
the end of one segment and leave the next.
"""

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
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
SEGMENT, SPARE = ".log", ".spare"
SPARES = 2
NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]*")
SYNC_INTERVAL_SECONDS = 1.0
"""Time between syncs for "everysec"."""


class WriteAheadLog:
    """Write-ahead log in one folder of segments; all methods are thread-safe.

    Appends are written completely, in order of the calls. The first `begin` creates the folder.
    Only one log may write to a folder at a time. The constructor raises OSError if a segment
    cannot be read, since clearing it would lose unknown records.
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
        self._ticker = _Ticker(self._tick) if fsync == "everysec" else None

    def begin(self, name: str, records: Iterable[tuple[int, bytes, Sequence[Buffer]]]) -> None:
        """Makes a new segment, which starts with these records; on the disk before it becomes
        the current one.

        Appends wait meanwhile. Raises LogWriteError; nothing has changed then, appends go on in
        the segment before unless that is broken. Raises ValueError where the name does not sort
        after all earlier ones.
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
        """Writes a record at the end; with fsync "always" it is on the disk when this returns.

        Raises LogWriteError where that failed, and at once where the log was broken before; such
        a record may be read again later or not. Raises ValueError before the first `begin`,
        after `clear` and after `close`.
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
        """Brings all that was appended to the current segment to the disk. Raises LogWriteError."""
        if segment := self._current:
            segment.sync(segment.nbytes)

    @property
    def broken(self) -> str:
        """Why nothing more is appended until `begin` has made a new segment; empty while all is
        well.
        """
        segment = self._current
        return str(segment.failure) if segment and segment.failure else ""

    @property
    def nbytes(self) -> int:
        """Of the current segment, up to the end of its last record."""
        segment = self._current
        return segment.nbytes if segment else 0

    def segments(self) -> list[str]:
        """The names on the disk, ascending, complete ones and the one that was being written.
        Raises OSError.
        """
        return self._names(SEGMENT)

    def read(self, name: str) -> RecordReader:
        """All whole records of a segment; the reader's `torn` tells of a torn end once it has
        given the last one.

        Raises LogDamagedError where a valid record follows a damaged one. Not for a segment that
        is retired meanwhile: it seems to end where its file has been written over.
        """
        return RecordReader(self._path(name, SEGMENT))

    def retire(self, before: str) -> None:
        """Segments with smaller names are not needed any more: a few files become spares, the
        others are removed.

        The current segment stays. Raises LogWriteError; some of them are gone then, the oldest
        first. After a power cut some may be back.
        """
        with self._lock, self._writing():
            current = self._current.path.stem if self._current else ""
            self._drop([name for name in self.segments() if name < before and name != current])

    def clear(self) -> None:
        """Remove all segments; segment names may start again.

        Raises:
            LogWriteError: some segments are left, the oldest ones; `begin` removes them.
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
        """Ends the log; what it holds stays. Harmless to repeat. Raises LogWriteError where the
        last sync failed.
        """
        if self._ticker:
            self._ticker.stop()
        with self._lock:
            try:
                self._settle()
            finally:
                if self._current:
                    self._current.close()
                self._current = None

    def _tick(self) -> None:
        with suppress(LogWriteError):  # the log is broken then, and the next append says so
            self.sync()

    def _settle(self) -> None:
        """Syncs what the current segment holds before it is left, so that a power cut leaves no
        gap.
        """
        if self._current and self._fsync != "no" and not self._current.unsyncable:
            self._current.sync(self._current.nbytes)

    def _make(
        self, name: str, records: Iterable[tuple[int, bytes, Sequence[Buffer]]]
    ) -> LogSegment:
        """A segment that is on the disk; where that fails, nothing of it."""
        self._make_folder()
        self._remove_stray()
        spare, target = self._spare(name), self._path(name, SEGMENT)
        try:
            return self._fill(LogSegment(self._files, spare), target, records)
        except BaseException:
            for path in (
                target,
                spare,
            ):  # not kept as a spare: a bad spot of the disk would fail each begin
                with suppress(OSError):
                    self._files.remove(path)
            raise

    def _fill(
        self,
        segment: LogSegment,
        target: Path,
        records: Iterable[tuple[int, bytes, Sequence[Buffer]]],
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
        """Create the folder, also after another process has removed it."""
        if not self._made or not self.folder.is_dir():
            self._files.make_folder(self.folder)
            self._files.sync_folder(self.folder.parent)
            self._made = True

    def _spare(self, name: str) -> Path:
        """The file to write to."""
        spares = self._names(SPARE)
        if not spares:
            return self._path(name, SPARE)
        self._files.sync_folder(self.folder)
        return self._path(spares[0], SPARE)

    def _remove_stray(self) -> None:
        """Removes what a begin that failed could not take back, and a clear that failed could
        not remove.
        """
        for name in self.segments():
            if name > self._newest:
                self._files.remove(self._path(name, SEGMENT))

    def _drop(self, names: list[str]) -> None:
        for name in names:
            if len(self._names(SPARE)) < SPARES:
                self._files.rename(self._path(name, SEGMENT), self._path(name, SPARE))
            else:
                self._files.remove(self._path(name, SEGMENT))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """What a disk fails to do inside leaves as a LogWriteError with a path."""
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


class _Ticker(threading.Thread):
    """Calls `tick` once in SYNC_INTERVAL_SECONDS seconds until it is stopped."""

    def __init__(self, tick: Callable[[], None]) -> None:
        super().__init__(name="log-sync", daemon=True)
        self._tick = tick
        self._stopped = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._stopped.wait(SYNC_INTERVAL_SECONDS):
            self._tick()

    def stop(self) -> None:
        self._stopped.set()
        self.join()
