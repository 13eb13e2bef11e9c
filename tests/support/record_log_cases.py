"""Small logs, and disks with injected failures."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from pscommon.wal.log import LogDamagedError, LogFiles, WriteAheadLog

Row = tuple[int, bytes, bytes]
FIRST: Row = (1, b"first", b"")
ROWS: list[Row] = [(2, b"header", bytes(range(40))), (3, b"", b"x" * 25), (70000, b"end", b"")]


def row(number: int, nbytes: int = 20) -> Row:
    """Return a record that differs from all others."""
    return number, b"header %d" % number, bytes([number % 256]) * nbytes


def begin(log: WriteAheadLog, name: str, *rows: Row) -> None:
    log.begin(name, [(kind, header, [payload]) for kind, header, payload in rows])


def append(log: WriteAheadLog, *rows: Row) -> None:
    for kind, header, payload in rows:
        log.append(kind, header, [payload])


def rows_of(log: WriteAheadLog, name: str) -> tuple[list[Row], bool]:
    """Return the records of a segment and whether its end is torn."""
    reader = log.read(name)
    rows = [(kind, header, payload.tobytes()) for kind, header, payload in reader]
    return rows, reader.torn


def readable(log: WriteAheadLog, name: str) -> tuple[list[Row], str]:
    """Return the readable records of a segment and its end: "whole", "torn" or "damaged"."""
    reader, rows = log.read(name), []
    try:
        for kind, header, payload in reader:
            rows.append((kind, header, payload.tobytes()))
    except LogDamagedError:
        return rows, "damaged"
    return rows, "torn" if reader.torn else "whole"


def stored(folder: Path) -> dict[str, tuple[list[Row], bool]]:
    """Return all segments as a new process would find them."""
    log = WriteAheadLog(folder, "no")
    return {name: rows_of(log, name) for name in log.segments()}


class Watched(LogFiles):
    """The real disk with a list of operations."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def _meet(self, operation: str) -> None:
        self.seen.append(operation)

    def make_folder(self, path: Path) -> None:
        self._meet("make_folder")
        super().make_folder(path)

    def open(self, path: Path) -> int:
        self._meet("open")
        return super().open(path)

    def write(self, descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        self._meet("write")
        return super().write(descriptor, views, offset)

    def sync(self, descriptor: int) -> None:
        self._meet("sync")
        super().sync(descriptor)

    def sync_folder(self, path: Path) -> None:
        self._meet("sync_folder")
        super().sync_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        self._meet("rename")
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self._meet("remove")
        super().remove(path)


class Failing(Watched):
    """Fails the n-th operation with `code`, with `for_good` also all later ones.

    Without a code a write is cut short. A failing write has written `part` bytes, as on a full
    disk.
    """

    def __init__(self, limit: int, code: int, part: int = 0, for_good: bool = False) -> None:
        super().__init__()
        self.limit = limit
        self._code = code
        self._part = part
        self._for_good = for_good

    @property
    def failed(self) -> bool:
        return 0 < self.limit <= len(self.seen)

    def _due(self) -> bool:
        return self.failed if self._for_good else len(self.seen) == self.limit

    def _meet(self, operation: str) -> None:
        super()._meet(operation)
        if operation != "write" and self._due():
            raise OSError(self._code or errno.EIO, os.strerror(self._code or errno.EIO))

    def write(self, descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        self._meet("write")
        if not self._due():
            return os.pwritev(descriptor, views, offset)
        part = b"".join(views)[: self._part]
        done = os.pwrite(descriptor, part, offset)
        if self._code:
            raise OSError(self._code, os.strerror(self._code))
        return done
