"""What every worker did, one JSON line when an operation begins and one when it has ended,
written before it goes on.

A process that is killed leaves an operation that has begun and not ended: nobody knows what
became of it. Times are this host's monotonic clock, the same in all processes.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from math import inf
from pathlib import Path
from typing import Any, Literal

Kind = Literal["push", "pull", "lease"]


@dataclass
class Operation:
    """One call of a worker.

    process: its rank and attempt, "w1.0". worker, seq: the push's key, seq 0: none was sent.
    before, after: versions of the weights that it had and that it got, -1: none. status: as
    PushResult.status, "error" where the call raised, "" until it has ended. batches: (loop,
    number) that a push uses up or that a lease brings. counters: smallest and largest element of
    each tensor named counter*, after. crc: of the gradients. total: batches of the lease's loop,
    of which `ended` says that it is over.
    """

    process: str
    kind: Kind
    begin: float
    end: float = inf
    worker: int = 0
    seq: int = 0
    before: int = -1
    after: int = -1
    status: str = ""
    reason: str = ""
    staleness: int = 0
    batches: tuple[tuple[int, int], ...] = ()
    counters: tuple[float, ...] = ()
    crc: int = 0
    total: int = 0
    ended: bool = False

    @property
    def key(self) -> tuple[int, int]:
        return self.worker, self.seq

    @property
    def applied(self) -> bool:
        """A push that was acknowledged as counted."""
        return self.kind == "push" and self.status in ("applied", "duplicate")

    @property
    def doubtful(self) -> bool:
        """A push that may have counted or not."""
        return self.kind == "push" and self.status in ("", "error")


class Journal:
    """Appends to folder/<process>.jsonl. A line is one write, so a killed process tears none but
    perhaps its last.
    """

    def __init__(self, folder: Path, process: str) -> None:
        self.process = process
        folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(
            folder / f"{process}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600
        )
        self._count = 0

    @contextmanager
    def operation(self, kind: Kind, **known: Any) -> Iterator[Operation]:
        """Fill in what came of it; what is raised inside is written and raised on."""
        operation = Operation(self.process, kind, time.monotonic(), **known)
        number, self._count = self._count, self._count + 1
        self._write(number, operation)
        try:
            yield operation
        except BaseException as error:
            operation.status, operation.reason = "error", f"{type(error).__name__}: {error}"[:300]
            raise
        finally:
            operation.end = time.monotonic()
            self._write(number, operation)

    def close(self) -> None:
        os.close(self._file)

    def _write(self, number: int, operation: Operation) -> None:
        values = asdict(operation) | {
            "end": None if operation.end == inf else operation.end,
            "number": number,
        }
        os.write(self._file, json.dumps(values, separators=(",", ":")).encode() + b"\n")


def read(folder: Path) -> list[Operation]:
    """All operations of all journals, in the order in which they began."""
    found = [
        operation
        for path in sorted(folder.glob("*.jsonl"))
        for operation in parsed(path.read_text().split("\n"))
    ]
    return sorted(found, key=lambda operation: operation.begin)


def parsed(lines: Iterable[str]) -> list[Operation]:
    """Of one process. What follows the last end of line was torn when it died: its beginning is
    known, or nothing.
    """
    *whole, _ = lines
    operations: dict[int, Operation] = {}
    for line in whole:
        values = json.loads(line)
        operations[values.pop("number")] = _operation(values)
    return list(operations.values())


def _operation(values: dict[str, Any]) -> Operation:
    values["end"] = inf if values["end"] is None else values["end"]
    values["batches"] = tuple((loop, number) for loop, number in values["batches"])
    values["counters"] = tuple(values["counters"])
    return Operation(**{field.name: values[field.name] for field in fields(Operation)})
