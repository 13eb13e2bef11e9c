"""Counted disk operations of a server; any of them can fail or be its last one."""

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import pytest

from pscommon.snapshot.atomic_files import AtomicFiles
from pscommon.wal.log import LogFiles

OPERATIONS = {
    LogFiles: ("make_folder", "open", "write", "sync", "sync_folder", "rename", "remove"),
    AtomicFiles: ("make_folder", "save", "write", "overwrite", "sync", "rename", "remove"),
}
NAMES = {LogFiles: "log", AtomicFiles: "snapshot"}


class Operation(NamedTuple):
    """A disk operation: kind of files (log, snapshot) and name."""

    files: str
    name: str


Act = Callable[[Operation, Callable[[], Any], Sequence[Any]], Any]
"""Handles an operation: the operation, a call that performs it, its arguments."""


class Operations:
    """Passes operations `first` to `last`, counted from 1, to `act`, the others to the disk.

    last: as given, or the number of operations when `heal` was called.
    seen: all operations.
    acted: number of operations passed to `act`.
    """

    def __init__(self, first: int, last: int, act: Act) -> None:
        self.seen: list[Operation] = []
        self.acted = 0
        self._first, self.last, self._act = first, last, act
        self._lock = threading.Lock()

    def install(self, how: Callable[[type, str, Any], None]) -> None:
        """Patch all logs and snapshots. how: monkeypatch.setattr or setattr."""
        for files, names in OPERATIONS.items():
            for name in names:
                how(files, name, self._watched(Operation(NAMES[files], name), getattr(files, name)))

    @contextmanager
    def installed(self) -> Iterator[Self]:
        """Patch all logs and snapshots in this context."""
        with pytest.MonkeyPatch.context() as patch:
            self.install(patch.setattr)
            yield self

    def heal(self) -> None:
        """Pass all further operations to the disk."""
        with self._lock:
            self.last = min(self.last, len(self.seen))

    def _watched(self, operation: Operation, real: Callable[..., Any]) -> Callable[..., Any]:
        def method(files: object, *arguments: Any) -> Any:
            with self._lock:
                self.seen.append(operation)
                number = len(self.seen)
                due = self._first <= number <= self.last
                self.acted += due
            if due:
                return self._act(operation, lambda: real(files, *arguments), arguments)
            return real(files, *arguments)

        return method


def failing(code: int) -> Act:
    """Return a handler that fails with this error number."""

    def act(operation: Operation, real: Callable[[], Any], arguments: Sequence[Any]) -> Any:
        raise OSError(code, os.strerror(code))

    return act


def short(operation: Operation, real: Callable[[], Any], arguments: Sequence[Any]) -> Any:
    """Fill up the disk during a write; other operations find it full."""
    if operation == Operation("log", "write"):
        descriptor, views, offset = arguments
        data_to_write = b"".join(views)
        os.pwrite(descriptor, data_to_write[: len(data_to_write) // 2], offset)
    elif operation == Operation("snapshot", "overwrite"):
        path, offset, data = arguments
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(data[: len(data) // 2])
    elif operation.name in ("save", "write"):
        real()
        os.truncate(arguments[0], arguments[0].stat().st_size // 2)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


TROUBLES: dict[str, Act] = {
    "ENOSPC": failing(errno.ENOSPC),
    "EIO": failing(errno.EIO),
    "EROFS": failing(errno.EROFS),
    "short": short,
}
