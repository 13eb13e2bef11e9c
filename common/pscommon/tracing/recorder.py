"""Record spans in this process while someone asks for them.

Theory of operation:

- Off, which is normal, a span costs one branch: `now` returns 0, and its caller records nothing.
- A server always measures the phases of its shard, and adds up their seconds.
- On, a span is a tuple in a buffer. The thread that sends heartbeats or reports empties it once a
  second, and switches recording off when shard 0 no longer asks.
- A buffer holds what one message may carry. What comes later is dropped step by step: a push of
  which one span is dropped loses all of them, in this message and the next.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from pscommon.core.limits import MAX_SPAN_BATCH_NBYTES
from pscommon.tracing.spans import SHARD_PHASES, Span

RECORDING_SECONDS = 3.0
"""How long a process records after the last request for spans."""

SPAN_BYTES = 26
"""Bytes of a span in a message, at most, in a job with fewer than 2 million updates."""

PUSH_BYTES = 7

Pushes = tuple[tuple[int, int], ...]


class SpanRecorder:
    """The spans of one role in this process. All methods may be called from any thread.

    Args:
        clock: The monotonic clock, in seconds.
        measured: Names of the spans whose seconds are always added up.

    Attributes:
        phase_seconds: Their seconds by name, since the start of the process. Those at the same
            time count each.
        is_on: Whether spans are recorded.
        dropped_steps: Steps whose spans were dropped, since the start of the process.
        recordings: How often recording has begun.
        step: Worker and number of the push of the script's current step, for spans that precede
            the push. The worker is 0 before it has registered the model.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, measured: Sequence[str] = ()
    ) -> None:
        self.clock = clock
        self.phase_seconds = dict.fromkeys(measured, 0.0)
        self._lock = threading.Lock()  # guards the seconds
        self.is_on, self.recordings, self.dropped_steps = False, 0, 0
        self.step = (0, 0)
        self._ends_at = 0.0
        self._spans: deque[Span] = deque()
        self._nbytes = 0
        self._dropped: set[tuple[int, int]] = set()
        self._dropped_before: set[tuple[int, int]] = set()

    def now(self) -> float:
        """Return the monotonic time in seconds; 0 if nothing is recorded or measured."""
        return self.clock() if self.is_on or self.phase_seconds else 0.0

    def add(
        self,
        name: str,
        began: float,
        pushes: Pushes = (),
        version: int = 0,
        shard: int = 0,
        ended: float | None = None,
    ) -> None:
        """Measure and record a span; see `pscommon.tracing.spans`. ended: By default now."""
        seconds = (self.clock() if ended is None else ended) - began
        if name in self.phase_seconds:
            with self._lock:
                self.phase_seconds[name] += seconds
        if not self.is_on:
            return
        if self._nbytes > MAX_SPAN_BATCH_NBYTES:
            self._dropped.update(pushes)
            return
        self._nbytes += SPAN_BYTES + PUSH_BYTES * len(pushes)
        thread = threading.current_thread().name
        self._spans.append(Span(name, began, seconds, pushes, version, shard, thread))

    def add_of_step(self, name: str, began: float, version: int = 0) -> None:
        """Record a span of the script's current step, which ends now."""
        self.add(name, began, (self.step,), version)

    def open_push(self, worker: int, push: int) -> None:
        """Note the number of a push: the script's step has it, or an earlier one."""
        if self.step[0] != worker or self.step[1] < push:
            self.step = (worker, push)

    def finish_step(self) -> None:
        """Begin the script's next step."""
        self.step = (self.step[0], self.step[1] + 1)

    def set_wanted(self, is_wanted: bool) -> None:
        """Take what shard 0 says; where it says nothing, recording ends by itself in `take`."""
        if is_wanted:
            self._ends_at = self.clock() + RECORDING_SECONDS
        else:
            self._ends_at = 0.0
        self._switch()

    def _switch(self) -> None:
        is_on = self.clock() < self._ends_at
        if is_on and not self.is_on:
            self._empty()
            self.recordings += 1
        self.is_on = is_on

    def take(self) -> tuple[list[Span], int]:
        """Return the spans since the last call, and the number of steps that were dropped."""
        self._switch()
        spans, dropped = self._empty()
        self.dropped_steps += len(dropped)
        left_out = dropped | self._dropped_before
        self._dropped_before = dropped
        if left_out:
            spans = [span for span in spans if left_out.isdisjoint(span.pushes)]
        return spans, len(dropped)

    def _empty(self) -> tuple[list[Span], set[tuple[int, int]]]:
        spans, self._spans = self._spans, deque()
        dropped, self._dropped = self._dropped, set()
        self._nbytes = 0
        return list(spans), dropped


worker_spans = SpanRecorder()
"""The spans of the worker in this process."""

server_spans = SpanRecorder(measured=SHARD_PHASES)
"""The spans of the server in this process."""
