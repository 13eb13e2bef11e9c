"""Tracing on shard 0: parts for several readers, bounds, decisions, and the end of recording."""

import pytest

from pscommon.core.log_entries import Apply, Contribution, PushKey, ShardReport, Staged
from pscommon.tracing.batch import decode_spans, encode_spans
from pscommon.tracing.recorder import RECORDING_SECONDS, SpanRecorder
from pscommon.tracing.spans import Span
from psproto.v1 import coordinator_pb2 as pb
from psserver.monitoring import tracing
from psserver.monitoring.tracing import DecisionSpans, Tracing
from tests.support.hand_clock import HandClock


def make() -> tuple[Tracing, SpanRecorder, HandClock]:
    clock = HandClock()
    recorder = SpanRecorder(clock)
    return Tracing(recorder), recorder, clock


def some_spans(count: int = 1) -> bytes:
    return encode_spans([Span("compute", 1.0, 2.0, ((1, 1),))] * count)


def start(made: Tracing) -> int:
    return made.answer(pb.GetTraceRequest()).next


def test_processes_record_from_the_first_request_until_3_seconds_after_the_last() -> None:
    made, recorder, clock = make()
    assert not made.is_wanted

    start(made)
    assert made.is_wanted
    assert recorder.is_on

    clock.now += RECORDING_SECONDS + 0.1
    made.tick()
    assert not made.is_wanted
    assert not recorder.is_on


def test_spans_that_nobody_wants_are_not_stored() -> None:
    made, _, _ = make()
    made.add("worker", 1, some_spans())
    first = start(made)

    assert not made.answer(pb.GetTraceRequest(after=first)).parts


def test_two_readers_get_all_parts_each() -> None:
    made, _, _ = make()
    one, two = start(made), start(made)
    made.add("worker", 1, some_spans())

    answer = made.answer(pb.GetTraceRequest(after=one))
    assert [(part.role, part.number) for part in answer.parts] == [("worker", 1)]
    made.add("shard", 2, some_spans())

    assert [part.number for part in made.answer(pb.GetTraceRequest(after=two)).parts] == [1, 2]
    assert [part.number for part in made.answer(pb.GetTraceRequest(after=answer.next)).parts] == [2]


def test_the_spans_of_shard_0_come_with_its_own_clock() -> None:
    made, recorder, _ = make()
    first = start(made)
    recorder.add("apply", 99.0, version=3)

    (part,) = made.answer(pb.GetTraceRequest(after=first)).parts

    found = decode_spans(part.role, part.number, part.spans)
    assert (found.role, found.number, found.uncertainty_seconds) == ("shard", 0, 0.0)
    assert [span.version for span in found.spans] == [3]


def test_a_long_answer_comes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_ANSWER_NBYTES", 2 * len(some_spans()))
    made, _, _ = make()
    after = start(made)
    for number in range(7):
        made.add("worker", number, some_spans())

    numbers, more = list[int](), True
    while more:
        answer = made.answer(pb.GetTraceRequest(after=after))
        numbers += [part.number for part in answer.parts]
        after, more = answer.next, answer.more

    assert numbers == list(range(7))


def test_old_parts_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_STORED_NBYTES", 3 * len(some_spans()))
    made, _, _ = make()
    after = start(made)
    for number in range(10):
        made.add("worker", number, some_spans())

    answer = made.answer(pb.GetTraceRequest(after=after))

    assert [part.number for part in answer.parts] == [7, 8, 9]
    assert answer.lost == 7


def test_numbers_of_an_earlier_server_are_no_error() -> None:
    made, _, _ = make()
    start(made)
    made.add("worker", 1, some_spans())

    assert not made.answer(pb.GetTraceRequest(after=2**64 - 1)).parts
    assert len(made.answer(pb.GetTraceRequest(after=0)).parts) == 1


def test_a_batch_that_is_too_long_is_not_stored() -> None:
    made, _, _ = make()
    after = start(made)
    made.add("worker", 1, bytes(tracing.MAX_BATCH_NBYTES + 1))

    assert not made.answer(pb.GetTraceRequest(after=after)).parts


def report(shard: int, *keys: PushKey) -> ShardReport:
    return ShardReport(shard, 1, 1, tuple(Staged(key, 1, 0) for key in keys))


def update(version: int, *keys: PushKey) -> Apply:
    return Apply(version, version, tuple(Contribution(key, 1, 0) for key in keys))


def test_a_barrier_lasts_from_a_report_to_the_one_that_decides() -> None:
    clock = HandClock()
    recorder = SpanRecorder(clock)
    recorder.set_wanted(True)
    decisions, one, two = DecisionSpans(recorder), PushKey(1, 5), PushKey(2, 4)
    decisions.record(report(0, one), 100.0, [])
    decisions.record(report(1, one), 101.0, [])
    decisions.record(report(0, one, two), 102.0, [])  # a complete report repeats the first push
    clock.now = 104.0

    decisions.record(report(1, two), 103.0, [update(9, one, two)])

    spans, _ = recorder.take()
    assert [(s.name, s.began, s.ended, s.pushes, s.shard) for s in spans] == [
        ("barrier", 100.0, 103.0, (one,), 0),
        ("barrier", 101.0, 103.0, (one,), 1),
        ("barrier", 102.0, 103.0, (two,), 0),
        ("barrier", 103.0, 103.0, (two,), 1),
        ("decide", 103.0, 104.0, (one, two), 0),
    ]
    assert {span.version for span in spans} == {9}


def test_arrivals_of_an_earlier_recording_do_not_count() -> None:
    recorder = SpanRecorder(HandClock())
    recorder.set_wanted(True)
    decisions, push = DecisionSpans(recorder), PushKey(1, 5)
    decisions.record(report(0, push), 50.0, [])
    recorder.set_wanted(False)
    recorder.set_wanted(True)

    decisions.record(report(1, push), 100.0, [update(9, push)])

    spans, _ = recorder.take()
    assert [(span.name, span.began) for span in spans] == [("barrier", 100.0), ("decide", 100.0)]
