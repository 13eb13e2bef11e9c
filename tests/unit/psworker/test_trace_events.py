"""The document of a trace: the Trace Event Format, and the way back."""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest

from pscommon.core.errors import InvalidRequestError
from pscommon.tracing.spans import ProcessSpans, Span
from psworker.core.trace_events import Trace, document, dropped_notes, from_document, merged
from tests.support.simulated_trace import Delay, SimulatedJob

NUMBER = (int, float)
FLOW = {"name": str, "cat": str, "id": int, "bp": str, "ts": NUMBER, "pid": int, "tid": int}
FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "X": {"name": str, "cat": str, "ts": NUMBER, "dur": NUMBER, "pid": int, "tid": int},
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
    "s": FLOW,
    "t": FLOW,
    "f": FLOW,
}
"""What the format asks of an event, by its `ph`."""
OF_METADATA = {
    "process_name": str,
    "process_sort_index": int,
    "thread_name": str,
    "thread_sort_index": int,
}

Event = Mapping[str, Any]

TRACES = {
    "plain": SimulatedJob(workers=4).trace(),
    "one": SimulatedJob(workers=1, shards=1).trace(),
    "pipelined": SimulatedJob(strategy="pipelined", policy="async", jitter=0.5).trace(),
    "overlapped": SimulatedJob(
        strategy="overlapped", policy="ssp", delay=Delay("compute", 1)
    ).trace(),
    "attempts": SimulatedJob(delay=Delay("compute", 0, 0.5), asks_again_seconds=0.1).trace(),
    "killed": SimulatedJob(killed=2, recording=(0.0, 1.0)).trace(),
}


def check_fields(event: Event) -> None:
    for field, kind in FIELDS[event["ph"]].items():
        assert isinstance(event[field], kind), event
        assert not isinstance(event[field], bool), event
    if event["ph"] == "M":
        (key,) = event["args"]
        assert event["name"].endswith(key)
        assert isinstance(event["args"][key], OF_METADATA[event["name"]])
    else:
        assert event["ts"] >= 0
        assert event.get("dur", 0) >= 0


def slices(events: list[Event]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Return start and end of the spans of each row, in nanoseconds."""
    rows: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start = round(event["ts"] * 1000)
            rows[event["pid"], event["tid"]].append((start, start + round(event["dur"] * 1000)))
    return rows


def check_nesting(spans: list[tuple[int, int]]) -> None:
    """Spans of a row are nested or apart."""
    open_ends: list[int] = []
    for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1]
        open_ends.append(end)


def check_flows(events: list[Event]) -> None:
    """Each arrow starts once, ends once, never goes back, and stops at spans only."""
    arrows: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            arrows[event["id"]].append(event)
    rows = slices(events)
    for steps in arrows.values():
        assert "".join(step["ph"] for step in steps) == "s" + "t" * (len(steps) - 2) + "f"
        assert all(before["ts"] <= after["ts"] for before, after in pairwise(steps))
        assert len({(step["cat"], step["name"], *step["args"].items()) for step in steps}) == 1
        for step in steps:
            assert step["bp"] == "e"
            time = round(step["ts"] * 1000)
            here = rows[step["pid"], step["tid"]]
            assert any(start <= time <= end for start, end in here), step


@pytest.mark.parametrize("job", TRACES)
def test_every_event_has_the_format(job: str) -> None:
    trace = TRACES[job]
    written = json.loads(json.dumps(document(trace), allow_nan=False))
    events = written["traceEvents"]

    for event in events:
        check_fields(event)
    for spans in slices(events).values():
        check_nesting(spans)
    check_flows(events)
    rows = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    named = Counter((e["pid"], e["tid"]) for e in events if e["name"] == "thread_name")
    assert rows == named.keys()
    assert set(named.values()) == {1}
    assert sum(e["ph"] == "X" for e in events) == sum(len(p.spans) for p in trace.processes)
    assert min(e["ts"] for e in events if e["ph"] == "X") == 0
    assert written["displayTimeUnit"] == "ms"


def test_processes_and_rows_are_named_by_role_and_number() -> None:
    events = document(TRACES["plain"])["traceEvents"]
    processes = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    rows: dict[int, set[str]] = defaultdict(set)
    for event in events:
        if event["name"] == "thread_name":
            rows[event["pid"]].add(event["args"]["name"])

    assert [*processes] == ["shard 0 (coordinator)", "shard 1", *(f"worker {n}" for n in range(4))]
    assert rows[processes["worker 3"]] == {"MainThread", "exchange 0", "exchange 1"}
    assert {f"barrier: worker {number}" for number in range(4)} < rows[1]


def test_spans_that_overlap_on_a_thread_get_rows_of_their_own() -> None:
    spans = [
        Span("receive", 1.0, 1.0, ((0, 1),), thread="streams"),
        Span("receive", 1.5, 1.0, ((1, 1),), thread="streams"),
        Span("check", 1.6, 0.2, ((1, 1),), thread="streams"),
        Span("receive", 2.0, 0.1, ((2, 1),), thread="streams"),
    ]
    events = document(Trace([ProcessSpans("shard", 0, spans)]))["traceEvents"]

    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {1: "streams", 2: "streams (2)"}
    assert [e["tid"] for e in events if e["ph"] == "X"] == [1, 2, 1, 1]


def test_a_barrier_names_the_missing_workers() -> None:
    """Those whose last report of the update comes later, also of its own shards."""
    spans = [
        Span("barrier", began, 5.0 - began, ((worker, 7),), 3, shard)
        for worker, shard, began in [
            (0, 0, 1.0),
            (0, 1, 1.5),
            (1, 0, 2.0),
            (1, 1, 4.0),
            (2, 0, 5.0),
        ]
    ]
    spans.append(Span("barrier", 5.5, 0.0, ((4, 1),), 4, 0))
    events = document(Trace([ProcessSpans("shard", 0, spans)]))["traceEvents"]
    missing = [e["args"]["missing"] for e in events if e["ph"] == "X"]

    assert missing == [
        ["worker 0", "worker 1", "worker 2"],
        ["worker 1", "worker 2"],
        ["worker 1", "worker 2"],
        ["worker 2"],
        [],
        [],
    ]


def test_the_arrow_of_a_push_passes_shard_and_coordinator() -> None:
    events = document(TRACES["plain"])["traceEvents"]
    pids = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    spans = {(e["pid"], e["tid"], e["ts"]): e["name"] for e in events if e["ph"] == "X"}
    arrow = [e for e in events if e["ph"] in "stf" and e["id"] == 8]

    assert {(e["args"]["worker"], e["args"]["shard"]) for e in arrow} == {(0, 1)}
    assert [pids[e["pid"]] for e in arrow] == [
        "worker 0",
        "shard 1",
        "shard 0 (coordinator)",
        "shard 1",
        "worker 0",
    ]
    assert [spans.get((e["pid"], e["tid"], e["ts"])) for e in arrow[:4]] == [
        "send",
        "receive",
        "decide",
        "apply",
    ]


@pytest.mark.parametrize("job", TRACES)
def test_the_document_gives_the_trace_back(job: str) -> None:
    trace = TRACES[job]._replace(lost_batches=2)
    back = from_document(json.loads(json.dumps(document(trace))))

    assert back._replace(processes=[]) == trace._replace(processes=[])
    for found, process in zip(back.processes, trace.processes, strict=True):
        assert found._replace(spans=()) == process._replace(spans=())
        ours, theirs = sorted(process.spans), sorted(found.spans)
        assert [s[3:] for s in sorted(theirs)] == [s[3:] for s in ours]
        for one, other in zip(ours, theirs, strict=True):
            assert other.name == one.name
            assert other.began == pytest.approx(one.began, abs=3e-9)
            assert other.seconds == pytest.approx(one.seconds, abs=3e-6)


def test_an_empty_trace_has_a_document() -> None:
    trace = Trace([ProcessSpans("worker", 0, [])], 1.0, "1.0")

    assert from_document(document(trace)) == trace
    assert from_document(document(Trace([]))) == Trace([])


def test_batches_of_a_process_are_merged() -> None:
    one, two, three = (Span("data", float(began), 0.5) for began in range(3))
    batches = [
        ProcessSpans("worker", 1, [one], 0.0, None, 1),
        ProcessSpans("shard", 0, [three], 0.0, 0.0),
        ProcessSpans("worker", 1, [two], 5.0, 0.002, 2),
        ProcessSpans("worker", 1, [three], 5.02, 0.03),
    ]

    assert merged(batches) == [
        ProcessSpans("shard", 0, [three], 0.0, 0.0),
        ProcessSpans("worker", 1, [one, two, three], 5.0, 0.002, 3),
    ]


def damaged(**changes: object) -> dict[str, Any]:
    found = document(TRACES["one"])
    found["otherData"].update(changes)
    return found


@pytest.mark.parametrize(
    ("loaded", "problem"),
    [
        ([], "it is not a trace of `ps-ctl trace`"),
        ({"traceEvents": []}, "it is not a trace of `ps-ctl trace`"),
        ({"traceEvents": [], "otherData": {"version": "x"}}, "not a trace of `ps-ctl trace`"),
        (damaged(paramserver_trace=2), "its format is 2, and this release reads 1"),
        (damaged(processes=[]), "it is damaged: KeyError"),
        (damaged(processes=None), "it is damaged: TypeError"),
        (damaged(origin_seconds="x"), "it is damaged: ValueError"),
        ({**damaged(), "traceEvents": [3]}, "it is damaged: TypeError"),
    ],
)
def test_a_file_that_is_no_trace_of_ours_is_refused(loaded: object, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        from_document(loaded)


def test_a_clock_that_jumped_is_named() -> None:
    """Worker 2 was suspended while it recorded: its offset changed by an hour."""
    batches = [
        ProcessSpans("worker", 1, [], 10.0, 0.001),
        ProcessSpans("worker", 1, [], 10.002, 0.003),
        ProcessSpans("worker", 2, [], 20.0, 0.001),
        ProcessSpans("worker", 2, [], 3620.0, 0.004),
    ]

    trace = Trace(merged(batches))

    assert [each.uncertainty_seconds for each in trace.processes] == [0.001, 3600.0]
    (note,) = dropped_notes(trace)
    assert note.startswith("the clock of worker 2 may be off by 3600.0 s")
    assert note.endswith("Try: record again")
