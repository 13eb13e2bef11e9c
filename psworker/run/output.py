"""Output streams of ps-run that never raise and never block their writers."""

import io
import os
import select
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

MAX_QUEUED_BYTES = 8 << 20
WRITE_BYTES = 4096
STALL_SECONDS = 1.0


class Output(io.TextIOBase):
    """Stream with a queue and a thread that writes the queue to `stream`.

    write() neither blocks nor raises. It escapes characters that the encoding lacks, and drops
    everything after a write error (`ps-run | head`, a full disk). Callers that write much call
    wait_for_space() first.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self.problem = ""
        self._stream = stream
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
        self._changed = threading.Condition()
        self._queue: deque[bytes] = deque()
        self._size = 0  # bytes that are not written yet
        self._dropped_lines = 0
        self._is_blocking = True
        self._is_broken = stream is None
        if stream is not None:
            # os.write by a daemon: a thread that blocks inside the stream's own lock would abort
            # the process at exit
            threading.Thread(
                target=self._write_all, args=(stream.fileno(),), name="output", daemon=True
            ).start()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # rich chooses its characters by it
        return self._encoding

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    @property
    def is_behind(self) -> bool:
        """Return whether bytes are queued."""
        return self._size > 0

    def write(self, text: str) -> int:
        data = text.encode(self._encoding, "backslashreplace")
        with self._changed:
            if not self._is_broken:
                self._queue.append(data)
                self._size += len(data)
                self._changed.notify_all()
        return len(text)

    def wait_for_space(self) -> bool:
        """Block while the queue is full; return False if the line is to be dropped instead.

        Lines are dropped only after `stop_blocking`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._size < MAX_QUEUED_BYTES or not self._is_blocking)
            if self._size < MAX_QUEUED_BYTES:
                return True
            self._dropped_lines += 1
            return False

    def stop_blocking(self) -> None:
        """Let wait_for_space() return at once from now on."""
        with self._changed:
            self._is_blocking = False
            self._changed.notify_all()

    def finish(self, stall_seconds: float | None = None) -> None:
        """Wait until everything is written, or until no progress is made for `stall_seconds`."""
        if self._dropped_lines:
            self.write(f"[run] {self._dropped_lines} lines were dropped: the reader was too slow\n")
            self._dropped_lines = 0
        with self._changed:
            while self._size and self._wait_for_progress(stall_seconds):
                pass

    def _wait_for_progress(self, stall_seconds: float | None) -> bool:
        before = self._size
        return self._changed.wait_for(lambda: self._size < before, stall_seconds)

    def _write_all(self, descriptor: int) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._queue)
                    data = memoryview(b"".join(self._queue))
                    self._queue.clear()
                while data:
                    written = _write(descriptor, data[:WRITE_BYTES])
                    data = data[written:]
                    with self._changed:
                        self._size -= written
                        self._changed.notify_all()
        except OSError as error:
            with self._changed:
                self.problem = "" if isinstance(error, BrokenPipeError) else str(error)
                self._is_broken = True
                self._queue.clear()
                self._size = 0
                self._changed.notify_all()


def _write(descriptor: int, data: memoryview) -> int:
    try:
        return os.write(descriptor, data)
    except BlockingIOError:  # another program set the terminal to non-blocking mode
        select.select([], [descriptor], [])
        return 0


@contextmanager
def outputs(out: TextIO | None, err: TextIO | None) -> Iterator[tuple[Output, Output]]:
    """Yield an Output for each stream; one shared Output if both are the same file.

    A shared Output keeps the order of lines. At exit, each Output is written until it stalls for
    STALL_SECONDS.
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
