"""One step a second as OpenTelemetry spans, over OTLP (extra [otel]).

Theory of operation:

- OTEL_EXPORTER_OTLP_ENDPOINT, or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, in the environment of shard 0
  turns the export on. Then all processes record their spans all the time (`Tracing`).
- Workers and shards send their spans once a second. So shard 0 exports an update a few seconds
  after it: the newest one in each second.
- An exported step is one trace. Its root lasts from the first to the last span of the update's
  pushes. Below it is a span for each process, with the name of its role and number, and below that
  the phases of `pscommon.tracing.spans`. Each process has a resource of its own.

All other variables OTEL_EXPORTER_OTLP_* and OTEL_RESOURCE_ATTRIBUTES have the meaning that the
OpenTelemetry SDK gives them.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from pscommon.core.errors import PSError
from pscommon.telemetry.logs import get_logger
from pscommon.tracing.batch import decode_spans
from pscommon.tracing.spans import ProcessSpans, Span
from psproto.v1 import coordinator_pb2 as pb
from psserver.monitoring.tracing import Tracing

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

EVERY_SECONDS = 1.0
DELAY_SECONDS = 3.0
"""Age of an update whose spans all processes have sent: they send them once a second."""

STORED_SECONDS = 30.0
"""Age up to which spans wait for their update. A step that lasts longer lacks its first ones."""

NANOSECONDS_FACTOR = 1e9

log = get_logger(__name__)


class PlacedSpan(NamedTuple):
    """A span, its process, and its start on the clock of shard 0 in seconds."""

    role: str
    number: int
    began: float
    span: Span

    @property
    def ended(self) -> float:
        return self.began + self.span.seconds


def start_export(tracing: Tracing, environ: Mapping[str, str]) -> "StepExport | None":
    """Begin to export if the environment asks for it. A missing package is a warning."""
    if not any(environ.get(name) for name in ENDPOINTS):
        return None
    if find_spec("opentelemetry.exporter.otlp.proto.http") is None:
        log.warning(
            "otel_unavailable",
            problem="an OTLP endpoint is set, and the OpenTelemetry SDK is not installed",
            remedy="pip install 'paramserver[otel]', or unset OTEL_EXPORTER_OTLP_ENDPOINT",
        )
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return StepExport(tracing, OTLPSpanExporter())


class StepExport:
    """Exports steps from a thread of its own, until `close`. Training never waits for it."""

    def __init__(self, tracing: Tracing, exporter: "SpanExporter") -> None:
        self._tracing, self._exporter = tracing, exporter
        self._next: int | None = None  # number of the next part of the trace
        self._spans = deque[PlacedSpan]()
        self._exported: Span | None = None  # its decision
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="otel", daemon=True)
        self._thread.start()
        log.info("otel_started", every_seconds=EVERY_SECONDS)

    def close(self) -> None:
        """End the export. A request under way is not waited for."""
        self._ended.set()

    def _run(self) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        while not self._ended.wait(EVERY_SECONDS):
            self._fetch()
            spans = self._take_step(time.monotonic())
            if spans:
                exported = as_trace(spans, time.time() - time.monotonic())
                if self._exporter.export(exported) is not SpanExportResult.SUCCESS:
                    log.warning(
                        "otel_failed",
                        limited=True,
                        problem="a step could not be sent to the OTLP endpoint; training goes on",
                        remedy="check OTEL_EXPORTER_OTLP_ENDPOINT (HTTP, usually port 4318)",
                    )
        self._exporter.shutdown()

    def _fetch(self) -> None:
        """Take the new spans of all processes, and let them record."""
        more = True
        while more:
            answer = self._tracing.answer(pb.GetTraceRequest(after=self._next))
            self._next, more = answer.next, answer.more
            for part in answer.parts:
                try:
                    found = decode_spans(part.role, part.number, part.spans)
                except PSError as error:
                    log.warning("spans_unreadable", limited=True, problem=str(error))
                else:
                    self._spans.extend(_placed(found))

    def _take_step(self, now: float) -> list[PlacedSpan]:
        """Return the spans of the newest update that is old enough; none if it was exported."""
        while self._spans and self._spans[0].ended < now - STORED_SECONDS:
            self._spans.popleft()
        # the pushes whose workers have recorded them: at first not all of them record
        known = {push for each in self._spans if each.role == "worker" for push in each.span.pushes}
        decisions = [
            each.span
            for each in self._spans
            if each.span.name == "decide"
            and each.ended < now - DELAY_SECONDS
            and known.issuperset(each.span.pushes)
        ]
        newest = max(decisions, key=lambda span: span.ended, default=None)
        if newest is None or newest == self._exported:
            return []
        self._exported, pushes = newest, {*newest.pushes}
        return [each for each in self._spans if not pushes.isdisjoint(each.span.pushes)]


def _placed(found: ProcessSpans) -> Iterator[PlacedSpan]:
    for span in found.spans:
        yield PlacedSpan(found.role, found.number, span.began + found.offset_seconds, span)


def as_trace(spans: Sequence[PlacedSpan], wall_offset: float) -> "list[ReadableSpan]":
    """Return the spans of one update as one trace; see the module.

    Args:
        spans: Not empty.
        wall_offset: What to add to the clock of shard 0 to get the wall clock, in seconds.
    """
    trace = _Trace(wall_offset)
    version = max(each.span.version for each in spans if each.span.name == "decide")
    root = trace.add("step", spans, _resource("shard", 0), None, {"version": version})
    for role, number in sorted({(each.role, each.number) for each in spans}):
        own = [each for each in spans if (each.role, each.number) == (role, number)]
        resource = _resource(role, number)
        parent = trace.add(f"{role} {number}", own, resource, root, {})
        for each in own:
            about: dict[str, str | int] = {
                "thread": each.span.thread,
                "version": each.span.version,
            }
            trace.add(each.span.name, [each], resource, parent, about)
    return trace.spans


class _Trace:
    """A trace, to which spans are added from the root."""

    def __init__(self, wall_offset: float) -> None:
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

        self.spans: list[ReadableSpan] = []
        self._wall_offset, self._ids = wall_offset, RandomIdGenerator()
        self._trace_id = self._ids.generate_trace_id()

    def add(
        self,
        name: str,
        lasts: Sequence[PlacedSpan],
        resource: "Resource",
        parent: "ReadableSpan | None",
        attributes: Mapping[str, str | int],
    ) -> "ReadableSpan":
        """Add a span that lasts as long as these together."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, TraceFlags

        span = ReadableSpan(
            name,
            SpanContext(
                self._trace_id,
                self._ids.generate_span_id(),
                is_remote=False,
                trace_flags=TraceFlags(TraceFlags.SAMPLED),
            ),
            None if parent is None else parent.context,
            resource,
            {**attributes},
            start_time=self._nanoseconds(min(each.began for each in lasts)),
            end_time=self._nanoseconds(max(each.ended for each in lasts)),
        )
        self.spans.append(span)
        return span

    def _nanoseconds(self, at: float) -> int:
        return int((at + self._wall_offset) * NANOSECONDS_FACTOR)


def _resource(role: str, number: int) -> "Resource":
    """Return the resource of a process; OTEL_SERVICE_NAME has its usual meaning."""
    from opentelemetry.sdk.resources import Resource

    name = os.environ.get("OTEL_SERVICE_NAME") or "paramserver"
    return Resource.create({"service.name": name, "service.instance.id": f"{role} {number}"})
