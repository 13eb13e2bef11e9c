"""The spans of all processes of a job on shard 0, while someone asks for them (GetTrace)."""

import threading
from collections import deque
from collections.abc import Iterable

from pscommon.core.limits import MAX_SPAN_BATCH_NBYTES
from pscommon.core.log_entries import Apply, Entry, PushKey, ShardReport
from pscommon.tracing.batch import encode_spans
from pscommon.tracing.clock_offset import ClockOffset
from pscommon.tracing.recorder import RECORDING_SECONDS, SpanRecorder, server_spans
from psproto.v1 import coordinator_pb2 as pb

SAME_CLOCK = ClockOffset(0.0, 0.0)
MAX_STORED_NBYTES = 64 << 20
MAX_ANSWER_NBYTES = 4 << 20
MAX_BATCH_NBYTES = 2 * MAX_SPAN_BATCH_NBYTES
"""A longer batch is not one of this release, or the numbers in it are unusually long."""

MAX_WAITING_PUSHES = 10_000
"""Pushes whose arrival is noted: more cannot be waiting unless the job stands still."""


class Tracing:
    """Collects spans for GetTrace. All methods may be called from any thread.

    Recording begins with the first request, and ends RECORDING_SECONDS after the last one. The
    parts are numbered, so several readers can follow them.

    Args:
        recorder: The spans of this process, whose clock is the one that counts.
    """

    def __init__(self, recorder: SpanRecorder = server_spans) -> None:
        self._recorder = recorder
        self._lock = threading.Lock()
        self._asked_until = 0.0
        self._parts: deque[pb.TracePart] = deque()
        self._nbytes = 0
        self._next = 1  # number of the next part; 0 would look like an absent one

    @property
    def is_wanted(self) -> bool:
        """Whether processes are to record now."""
        return self._recorder.clock() < self._asked_until

    def tick(self) -> None:
        """End the recording, and free its parts, once the last request is too old."""
        if not self._asked_until or self.is_wanted:
            return
        with self._lock:
            self._asked_until, self._nbytes = 0.0, 0
            self._parts.clear()
        self._recorder.set_wanted(False)

    def add(self, role: str, number: int, spans: bytes) -> None:
        """Store what a process has sent; nothing if spans are not wanted."""
        if not spans or not self.is_wanted or len(spans) > MAX_BATCH_NBYTES:
            return
        part = pb.TracePart(role=role, number=number, spans=spans)
        with self._lock:
            self._parts.append(part)
            self._next += 1
            self._nbytes += len(spans)
            while self._nbytes > MAX_STORED_NBYTES:
                self._nbytes -= len(self._parts.popleft().spans)

    def answer(self, request: pb.GetTraceRequest) -> pb.GetTraceResponse:
        """Return the parts after the one that the request names, and let processes record."""
        self._asked_until = self._recorder.clock() + RECORDING_SECONDS
        self._recorder.set_wanted(True)
        spans, dropped = self._recorder.take()
        if spans or dropped:
            self.add("shard", 0, encode_spans(spans, dropped, SAME_CLOCK))
        with self._lock:
            first = self._next - len(self._parts)
            if not request.HasField("after"):
                return pb.GetTraceResponse(next=self._next)
            response = pb.GetTraceResponse(next=max(first, min(request.after, self._next)))
            response.lost = max(0, first - request.after)
            nbytes = 0
            while response.next < self._next and nbytes <= MAX_ANSWER_NBYTES:
                part = self._parts[response.next - first]
                response.parts.append(part)
                response.next += 1
                nbytes += len(part.spans)
            response.more = response.next < self._next
            return response


class DecisionSpans:
    """Records when reports arrive, and what they decide. The caller holds the machine's lock.

    Args:
        recorder: The spans of this process.
    """

    def __init__(self, recorder: SpanRecorder = server_spans) -> None:
        self._recorder = recorder
        self._arrivals: dict[tuple[PushKey, int], float] = {}
        self._recording = 0

    def record(self, report: ShardReport, arrived: float, entries: Iterable[Entry]) -> None:
        """Record a report, and the updates that it has decided.

        arrived: When it arrived, in monotonic seconds.
        entries: New entries of the log.
        """
        if self._recording != self._recorder.recordings:
            self._recording = self._recorder.recordings
            self._arrivals.clear()  # decided since then
        for staged in report.staged if len(self._arrivals) < MAX_WAITING_PUSHES else ():
            self._arrivals.setdefault((staged.key, report.shard), arrived)
        for entry in entries:
            if isinstance(entry, Apply):
                self._record_update(entry, arrived)

    def _record_update(self, entry: Apply, decided: float) -> None:
        pushes = tuple(each.key for each in entry.contributions)
        waited = [waiting for waiting in self._arrivals if waiting[0] in pushes]
        for waiting in waited:
            began, (push, shard) = self._arrivals.pop(waiting), waiting
            self._recorder.add("barrier", began, (push,), entry.version, shard, ended=decided)
        self._recorder.add("decide", decided, pushes, entry.version)
