"""Where ps-run writes to: streams that fail nobody, and hold up nobody who must go on, whoever
reads them.
"""

import io
import os
import select
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

MOST_BYTES = 8 << 20
PIECE = 4096
STALL_SECONDS = 1.0


class Output(io.TextIOBase):
    """A queue, and a thread that writes what is in it to `stream`.

    write() never waits and never raises: what the stream's encoding lacks is escaped, and once
    nobody can read any more (`ps-run | head`, a full disk), all is dropped. Who writes much asks
    for room() before.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self.problem = ""
        self._stream = stream
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
        self._changed = threading.Condition()
        self._queue: deque[bytes] = deque()
        self._size = 0  # of what is not written yet
        self._left_out = 0
        self._hurried = False
        self._lost = stream is None
        if stream is not None:
            # os.write by a daemon: a thread that is stuck in a stream's own lock would abort the
            # process at its end
            threading.Thread(
                target=self._write_all, args=(stream.fileno(),), name="output", daemon=True
            ).start()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # rich chooses its characters by it
        """That of the stream."""
        return self._encoding

    def isatty(self) -> bool:
        """Is the stream a terminal?"""
        return self._stream is not None and self._stream.isatty()

    @property
    def is_behind(self) -> bool:
        """Something waits to be written."""
        return self._size > 0

    def write(self, text: str) -> int:
        """Queues it."""
        data = text.encode(self._encoding, "backslashreplace")
        with self._changed:
            if not self._lost:
                self._queue.append(data)
                self._size += len(data)
                self._changed.notify_all()
        return len(text)

    def room(self) -> bool:
        """Waits while much is queued, as any writer to a full pipe. False, after `hurry`: leave
        it out.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._size < MOST_BYTES or self._hurried)
            if self._size < MOST_BYTES:
                return True
            self._left_out += 1
            return False

    def hurry(self) -> None:
        """From now on room() waits for nobody."""
        with self._changed:
            self._hurried = True
            self._changed.notify_all()

    def finish(self, patience: float | None = None) -> None:
        """Waits until all is written; or, with `patience`, until nothing more has been for so
        many seconds.
        """
        if self._left_out:
            self.write(f"[run] {self._left_out} lines are missing here: nobody read them in time\n")
            self._left_out = 0
        with self._changed:
            while self._size and self._shrinks(patience):
                pass

    def _shrinks(self, patience: float | None) -> bool:
        before = self._size
        return self._changed.wait_for(lambda: self._size < before, patience)

    def _write_all(self, descriptor: int) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._queue)
                    data = memoryview(b"".join(self._queue))
                    self._queue.clear()
                while data:
                    written = _write(descriptor, data[:PIECE])
                    data = data[written:]
                    with self._changed:
                        self._size -= written
                        self._changed.notify_all()
        except OSError as error:
            with self._changed:
                self.problem = "" if isinstance(error, BrokenPipeError) else str(error)
                self._lost = True
                self._queue.clear()
                self._size = 0
                self._changed.notify_all()


def _write(descriptor: int, data: memoryview) -> int:
    try:
        return os.write(descriptor, data)
    except BlockingIOError:  # a terminal that another program has made so
        select.select([], [descriptor], [])
        return 0


@contextmanager
def outputs(out: TextIO | None, err: TextIO | None) -> Iterator[tuple[Output, Output]]:
    """Both as Outputs, which are one where both lead to the same place: so lines keep their order.

    At the end what is still queued has STALL_SECONDS to get ahead.
    """
    first = Output(out)
    second = first if out and err and _is_same(out, err) else Output(err)
    try:
        yield first, second
    finally:
        for output in (first, second):
            output.finish(STALL_SECONDS)


def _is_same(out: TextIO, err: TextIO) -> bool:
    return os.path.samestat(os.fstat(out.fileno()), os.fstat(err.fileno()))
