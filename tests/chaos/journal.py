"""Journal of a worker: one JSON line when an operation begins and one when it ends.

Both are written before the worker continues. The result of an operation without an end is unknown:
the process was killed. Times are the host's monotonic clock.
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

    process: rank and attempt, "w1.0".
    worker, seq: key of the push; seq 0 means that no push was sent.
    before, after: version that the worker had and received, -1 for none.
    status: PushResult.status; "error" after an exception; "" until the end.
    batches: (loop, number) that a push uses or a lease brings.
    counters: smallest and largest element of each tensor named counter*, after the call.
    crc: checksum of the gradients.
    total: number of batches of the leased loop; ended: whether it is over.
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
        """Whether this is an acknowledged push."""
        return self.kind == "push" and self.status in ("applied", "duplicate")

    @property
    def doubtful(self) -> bool:
        """Whether this is a push that may or may not have counted."""
        return self.kind == "push" and self.status in ("", "error")


class Journal:
    """Appends to folder/<process>.jsonl. Each line is one write, so a kill tears at most the
    last.
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
        """Write begin and end of an operation; the caller fills in its result. Exceptions are
        written.
        """
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
    """Return the operations of all journals by start time."""
    found = [
        operation
        for path in sorted(folder.glob("*.jsonl"))
        for operation in parsed(path.read_text().split("\n"))
    ]
    return sorted(found, key=lambda operation: operation.begin)


def parsed(lines: Iterable[str]) -> list[Operation]:
    """Return the operations of one process. A torn last line is ignored."""
    *complete_lines, _ = lines
    operations: dict[int, Operation] = {}
    for line in complete_lines:
        values = json.loads(line)
        operations[values.pop("number")] = _operation(values)
    return list(operations.values())


def _operation(values: dict[str, Any]) -> Operation:
    values["end"] = inf if values["end"] is None else values["end"]
    values["batches"] = tuple((loop, number) for loop, number in values["batches"])
    values["counters"] = tuple(values["counters"])
    return Operation(**{field.name: values[field.name] for field in fields(Operation)})
