"""Everything that a server asks of its disk, counted, so that any of it can go wrong or be the
last thing it does.
"""

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
    """What was asked: of which files (log, snapshot), and what."""

    files: str
    name: str


Act = Callable[[Operation, Callable[[], Any], Sequence[Any]], Any]
"""Does an operation, or something worse: the operation, how it is really done, its arguments."""


class Operations:
    """The operations from the `first` on, counted from 1, up to the `last` go to `act`, all
    others to the real disk.

    last: as given, or how many there were when `heal` was called. seen: all that was asked;
    acted: how many of them went to `act`. install: puts it before all logs and snapshots; how:
    monkeypatch.setattr, or setattr.
    """

    def __init__(self, first: int, last: int, act: Act) -> None:
        self.seen: list[Operation] = []
        self.acted = 0
        self._first, self.last, self._act = first, last, act
        self._lock = threading.Lock()

    def install(self, how: Callable[[type, str, Any], None]) -> None:
        for files, names in OPERATIONS.items():
            for name in names:
                how(files, name, self._watched(Operation(NAMES[files], name), getattr(files, name)))

    @contextmanager
    def installed(self) -> Iterator[Self]:
        """Before all logs and snapshots, inside."""
        with pytest.MonkeyPatch.context() as patch:
            self.install(patch.setattr)
            yield self

    def heal(self) -> None:
        """From now on all goes to the real disk."""
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
    """A disk that says no."""

    def act(operation: Operation, real: Callable[[], Any], arguments: Sequence[Any]) -> Any:
        raise OSError(code, os.strerror(code))

    return act


def short(operation: Operation, real: Callable[[], Any], arguments: Sequence[Any]) -> Any:
    """A disk that fills up amid a write; other operations find it full."""
    if operation == Operation("log", "write"):
        descriptor, views, offset = arguments
        whole = b"".join(views)
        os.pwrite(descriptor, whole[: len(whole) // 2], offset)
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
