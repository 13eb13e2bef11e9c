"""A trace, and its document in the Trace Event Format of Perfetto and chrome://tracing.

Each process is a `pid`, each of its threads a row (`tid`). Spans on one row are nested or apart,
as the format asks: what would overlap otherwise gets a row of its own. Times are on the clock of
shard 0. Flow arrows follow each push from the worker over a shard's receive, the coordinator's
decision and the shard's apply back to the worker.

The document carries everything, so that `ps-ctl why FILE` reads it back.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple

from pscommon.core.errors import InvalidRequestError
from pscommon.tracing.clock_offset import ClockOffset
from pscommon.tracing.spans import COORDINATOR_SPANS, ProcessSpans, Span

FORMAT = 1
FORMAT_KEY = "paramserver_trace"
MICROSECONDS_FACTOR = 1_000_000
ROUNDING_SECONDS = 2e-6
"""Durations are recorded as numbers of 32 bits; what overlaps by less is cut."""

UNUSABLE_SECONDS = 1.0
"""Arrows between clocks that are so far apart mean nothing."""

Json = Mapping[str, Any]


class Trace(NamedTuple):
    """What the processes of a job have recorded.

    Attributes:
        processes: One for each process.
        seconds: For how long the recording was asked for.
        release: Release of the recording ps-ctl.
        lost_batches: Batches of spans that shard 0 dropped before they were asked for.
    """

    processes: Sequence[ProcessSpans]
    seconds: float = 0.0
    release: str = ""
    lost_batches: int = 0


def merged(batches: Iterable[ProcessSpans]) -> list[ProcessSpans]:
    """Return one ProcessSpans for each process; of its offsets the most certain one counts.

    Where a clock has jumped, the jump is part of the uncertainty. Times that are not finite are
    left out.
    """
    groups: dict[tuple[str, int], list[ProcessSpans]] = defaultdict(list)
    for batch in batches:
        groups[batch.role, batch.number].append(batch)
    processes = []
    for (role, number), parts in sorted(groups.items()):
        known = [part for part in parts if part.uncertainty_seconds is not None]
        best = min(known, key=lambda part: part.uncertainty_seconds or 0.0, default=parts[-1])
        spans = [span for part in parts for span in part.spans if is_sound(span)]
        dropped = sum(part.dropped_steps for part in parts)
        offset = best.offset_seconds, _uncertainty(known)
        processes.append(ProcessSpans(role, number, spans, *offset, dropped))
    return processes


def _uncertainty(known: Sequence[ProcessSpans]) -> float | None:
    """Return the smallest uncertainty, or how far the offsets lie apart if they contradict."""
    offsets = [
        ClockOffset(each.offset_seconds, each.uncertainty_seconds)
        for each in known
        if each.uncertainty_seconds is not None
    ]
    if not offsets:
        return None
    low, high = min(offsets), max(offsets)
    if high.contradicts(low):
        return high.seconds - low.seconds
    return min(each.uncertainty_seconds for each in offsets)


def is_sound(span: Span) -> bool:
    """Return whether the times of a span are finite, and its duration is not negative."""
    return isfinite(span.began) and isfinite(span.seconds) and span.seconds >= 0


def document(trace: Trace) -> dict[str, Any]:
    """Return the JSON document of a trace."""
    origin = min(
        (s.began + each.offset_seconds for each in trace.processes for s in each.spans),
        default=0.0,
    )
    processes = [_ProcessRows(pid, each, origin) for pid, each in enumerate(trace.processes, 1)]
    missing = _missing(trace)
    events = [event for each in processes for event in each.events(missing)]
    events += _flows(processes)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            FORMAT_KEY: FORMAT,
            "release": trace.release,
            "seconds": trace.seconds,
            "lost_batches": trace.lost_batches,
            "origin_seconds": origin,
            "processes": [each.metadata() for each in processes],
        },
    }


def dropped_notes(trace: Trace) -> list[str]:
    """Return what the trace lacks, one text each."""
    notes = [
        f"{process.role} {process.number} dropped the spans of {process.dropped_steps} steps"
        for process in trace.processes
        if process.dropped_steps
    ]
    notes += [
        f"the clock of {process.role} {process.number} may be off by "
        f"{process.uncertainty_seconds:.1f} s: its link is slow, or a machine was suspended. "
        "Try: record again"
        for process in trace.processes
        if (process.uncertainty_seconds or 0.0) >= UNUSABLE_SECONDS
    ]
    if trace.lost_batches:
        lost = trace.lost_batches
        notes.append(f"shard 0 dropped {lost} batches of spans before they were fetched")
    return notes


class _Slice:
    """One span as it is drawn, in seconds after the origin."""

    def __init__(self, span: Span, began: float) -> None:
        self.span, self.began, self.ended = span, began, began + span.seconds
        self.row = 0


class _ProcessRows:
    """One process of the document, with its rows."""

    def __init__(self, pid: int, process: ProcessSpans, origin: float) -> None:
        self.pid, self.process = pid, process
        shift = process.offset_seconds - origin
        self.slices = [_Slice(span, span.began + shift) for span in process.spans]
        self.rows: list[str] = []
        threads: dict[str, list[_Slice]] = defaultdict(list)
        for each in self.slices:
            threads[_row(each.span)].append(each)
        for name, slices in sorted(threads.items()):
            count = _divide(slices)
            for each in slices:
                each.row += len(self.rows) + 1
            self.rows += [name, *(f"{name} ({number})" for number in range(2, count + 1))]

    @property
    def name(self) -> str:
        has_coordinator = any(span.name in COORDINATOR_SPANS for span in self.process.spans)
        name = f"{self.process.role} {self.process.number}"
        return f"{name} (coordinator)" if has_coordinator else name

    def metadata(self) -> dict[str, Any]:
        process = self.process
        return {
            "pid": self.pid,
            "role": process.role,
            "number": process.number,
            "offset_seconds": process.offset_seconds,
            "uncertainty_seconds": process.uncertainty_seconds,
            "dropped_steps": process.dropped_steps,
        }

    def events(self, missing: Mapping[Span, list[int]]) -> Iterator[dict[str, Any]]:
        """Yield names and spans."""
        yield self._about("process_name", 0, {"name": self.name})
        yield self._about("process_sort_index", 0, {"sort_index": self.pid})
        for tid, name in enumerate(self.rows, 1):
            yield self._about("thread_name", tid, {"name": name})
            yield self._about("thread_sort_index", tid, {"sort_index": tid})
        for each in self.slices:
            span = each.span
            arguments: dict[str, Any] = {
                "pushes": [list(push) for push in span.pushes],
                "version": span.version,
                "shard": span.shard,
                "thread": span.thread,
            }
            if span.name == "barrier":
                arguments["missing"] = [f"worker {number}" for number in missing.get(span, ())]
            yield {
                "ph": "X",
                "name": span.name,
                "cat": "coordinator" if span.name in COORDINATOR_SPANS else self.process.role,
                "pid": self.pid,
                "tid": each.row,
                "ts": _microseconds(each.began),
                "dur": max(0.0, round(_microseconds(each.ended) - _microseconds(each.began), 3)),
                "args": arguments,
            }

    def _about(self, name: str, tid: int, arguments: Json) -> dict[str, Any]:
        return {"ph": "M", "name": name, "pid": self.pid, "tid": tid, "ts": 0, "args": arguments}


def _microseconds(seconds: float) -> float:
    return round(max(0.0, seconds) * MICROSECONDS_FACTOR, 3)


def _row(span: Span) -> str:
    """Return the name of the row for a span."""
    if span.name == "barrier" and span.pushes:
        return f"barrier: worker {span.pushes[0][0]}"
    return span.thread or span.name


def _divide(slices: list[_Slice]) -> int:
    """Give each slice a row on which slices are nested or apart; return the number of rows."""
    stacks: list[list[_Slice]] = []
    for each in sorted(slices, key=lambda each: (each.began, -each.ended)):
        for row, stack in enumerate(stacks):
            while stack and stack[-1].ended <= each.began + ROUNDING_SECONDS:
                above = stack.pop()
                above.ended = max(above.began, min(above.ended, each.began))
            if not stack or each.ended <= stack[-1].ended + ROUNDING_SECONDS:
                if stack:
                    each.ended = min(each.ended, stack[-1].ended)
                stack.append(each)
                each.row = row
                break
        else:
            each.row = len(stacks)
            stacks.append([each])
    return len(stacks)


def _missing(trace: Trace) -> dict[Span, list[int]]:
    """Return by barrier the workers of its update whose last report came later."""
    barriers = [span for each in trace.processes for span in each.spans if span.name == "barrier"]
    last: dict[int, dict[int, float]] = defaultdict(dict)
    for span in barriers:
        reports = last[span.version]
        for worker, _ in span.pushes:
            reports[worker] = max(reports.get(worker, span.began), span.began)
    return {
        span: sorted(worker for worker, time in last[span.version].items() if time > span.began)
        for span in barriers
    }


def _flows(processes: Sequence[_ProcessRows]) -> Iterator[dict[str, Any]]:
    """Yield the arrows of each push and shard."""
    chains: dict[tuple[int, int, int], dict[str, tuple[_ProcessRows, _Slice]]] = defaultdict(dict)
    decisions: dict[tuple[int, int], tuple[_ProcessRows, _Slice]] = {}
    for process in processes:
        role = process.process.role
        for each in sorted(process.slices, key=lambda each: each.ended):
            name = each.span.name
            shard = each.span.shard if role == "worker" else process.process.number
            for push in each.span.pushes:
                if name == "decide":
                    decisions[push] = process, each
                elif name in ("send", "receive") or (role, name) == ("shard", "apply"):
                    steps = chains[(*push, shard)]
                    key = f"{role} {name}"
                    if not (key in steps and name == ("send" if role == "worker" else "receive")):
                        steps[key] = process, each
    for number, ((worker, sequence, shard), steps) in enumerate(sorted(chains.items()), 1):
        if (worker, sequence) in decisions:
            steps["decide"] = decisions[worker, sequence]
        places = list(_places(steps))
        for phase, (process, each, time) in zip(
            ["s", *("t" for _ in places[2:]), "f"], places, strict=False
        ):
            yield {
                "ph": phase,
                "bp": "e",
                "name": "push",
                "cat": "push",
                "id": number,
                "pid": process.pid,
                "tid": each.row,
                "ts": time,
                "args": {"worker": worker, "push": sequence, "shard": shard},
            }


def _places(
    steps: Mapping[str, tuple[_ProcessRows, _Slice]],
) -> Iterator[tuple[_ProcessRows, _Slice, float]]:
    """Yield where a push's arrow stops; times never go back, although clocks are uncertain."""
    first, last = steps.get("worker send"), steps.get("worker receive")
    if first is None or last is None:
        return
    time = _microseconds(first[1].began)
    end = _microseconds(last[1].ended)
    if end <= time:
        return
    yield (*first, time)
    for name in ("shard receive", "decide", "shard apply"):
        if name in steps:
            process, each = steps[name]
            began, ended = _microseconds(each.began), _microseconds(each.ended)
            if max(time, began) < min(ended, end):
                time = max(time, began)
                yield process, each, time
    yield (*last, max(time, _microseconds(last[1].began), round(end - 1, 3)))


def from_document(loaded: object) -> Trace:
    """Return the trace of a document.

    Raises:
        InvalidRequestError: It is none of ours, or one of a newer release.
    """
    header = loaded.get("otherData") if isinstance(loaded, Mapping) else None
    form = header.get(FORMAT_KEY) if isinstance(header, Mapping) else None
    if not isinstance(loaded, Mapping) or not isinstance(header, Mapping) or form is None:
        raise InvalidRequestError("it is not a trace of `ps-ctl trace`")
    if form != FORMAT:
        raise InvalidRequestError(f"its format is {form}, and this release reads {FORMAT}")
    try:
        return _trace(loaded, header)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise InvalidRequestError(f"it is damaged: {type(error).__name__}: {error}") from error


def _trace(loaded: Json, header: Json) -> Trace:
    spans: dict[int, list[Span]] = {int(each["pid"]): [] for each in header["processes"]}
    offsets = {int(each["pid"]): float(each["offset_seconds"]) for each in header["processes"]}
    origin = float(header["origin_seconds"])
    for event in loaded["traceEvents"]:
        if event["ph"] != "X":
            continue
        pid, arguments = int(event["pid"]), event["args"]
        spans[pid].append(
            Span(
                str(event["name"]),
                float(event["ts"]) / MICROSECONDS_FACTOR + origin - offsets[pid],
                float(event["dur"]) / MICROSECONDS_FACTOR,
                tuple((int(worker), int(push)) for worker, push in arguments["pushes"]),
                int(arguments["version"]),
                int(arguments["shard"]),
                str(arguments["thread"]),
            )
        )
    if not all(is_sound(span) for found in spans.values() for span in found):
        raise ValueError("a time is not finite")
    processes = [
        ProcessSpans(
            str(each["role"]),
            int(each["number"]),
            sorted(spans[int(each["pid"])], key=lambda span: span.ended),
            float(each["offset_seconds"]),
            None if each["uncertainty_seconds"] is None else float(each["uncertainty_seconds"]),
            int(each["dropped_steps"]),
        )
        for each in header["processes"]
    ]
    release, seconds = str(header["release"]), float(header["seconds"])
    return Trace(processes, seconds, release, int(header["lost_batches"]))
