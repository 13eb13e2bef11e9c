"""Spans: recorded on request, dropped step by step, sent as columns, with the clock's offset."""

import pytest

from pscommon.core.errors import PSError
from pscommon.core.limits import MAX_SPAN_BATCH_NBYTES
from pscommon.tracing.batch import decode_spans, encode_spans
from pscommon.tracing.clock_offset import ClockOffset, OffsetEstimate
from pscommon.tracing.recorder import (
    RECORDING_SECONDS,
    SPAN_BYTES,
    SpanRecorder,
)
from pscommon.tracing.spans import SHARD_PHASES, Span
from psproto.v1 import coordinator_pb2 as co
from tests.support.hand_clock import HandClock


def recording() -> tuple[SpanRecorder, HandClock]:
    clock = HandClock()
    recorder = SpanRecorder(clock)
    recorder.set_wanted(True)
    return recorder, clock


def test_nothing_is_recorded_before_a_request() -> None:
    recorder = SpanRecorder(HandClock())

    assert not recorder.now()
    assert recorder.take() == ([], 0)


def test_a_span_lasts_until_it_is_added() -> None:
    recorder, clock = recording()
    began = recorder.now()
    clock.now += 0.25

    recorder.add("apply", began, ((1, 2), (3, 4)), version=7)

    spans, dropped = recorder.take()
    assert spans == [Span("apply", 100.0, 0.25, ((1, 2), (3, 4)), 7, 0, "MainThread")]
    assert dropped == 0
    assert recorder.take() == ([], 0)


def test_a_shard_measures_its_phases_without_a_request() -> None:
    clock = HandClock()
    recorder = SpanRecorder(clock, SHARD_PHASES)
    began = recorder.now()
    clock.now += 0.25

    recorder.add("apply", began, ((1, 2),), version=7)
    recorder.add("apply", began, ended=began + 0.125)
    recorder.add("lease", began)

    assert recorder.phase_seconds["apply"] == 0.375
    assert sum(recorder.phase_seconds.values()) == 0.375
    assert recorder.take() == ([], 0)


def test_recording_ends_by_itself_after_the_last_request() -> None:
    recorder, clock = recording()
    clock.now += RECORDING_SECONDS + 0.1

    recorder.take()

    assert not recorder.is_on


def test_recording_ends_when_shard_0_says_so() -> None:
    recorder, _ = recording()

    recorder.set_wanted(False)

    assert not recorder.is_on


def test_a_new_recording_begins_without_old_spans() -> None:
    recorder, _ = recording()
    recorder.add("apply", 99.0)
    recorder.set_wanted(False)

    recorder.set_wanted(True)

    assert recorder.take() == ([], 0)
    assert recorder.recordings == 2


def test_steps_beyond_the_buffer_are_dropped_and_counted() -> None:
    recorder, _ = recording()
    fits = MAX_SPAN_BATCH_NBYTES // SPAN_BYTES
    for number in range(2 * fits):
        recorder.add("send", 100.0, ((1, number // 2),))

    spans, dropped = recorder.take()

    pushes = [push for span in spans for push in span.pushes]
    assert {pushes.count(push) for push in set(pushes)} == {2}  # no step is there in part
    assert dropped + len(set(pushes)) == fits
    assert len(encode_spans(spans, dropped)) <= MAX_SPAN_BATCH_NBYTES


def test_a_dropped_step_is_left_out_of_the_next_batch() -> None:
    recorder, _ = recording()
    for number in range(MAX_SPAN_BATCH_NBYTES // SPAN_BYTES + 10):
        recorder.add("send", 100.0, ((1, number),))
    recorder.take()

    recorder.add("receive", 100.0, ((1, number),))
    recorder.add("receive", 100.0, ((1, number + 1),))

    spans, dropped = recorder.take()
    assert [span.pushes for span in spans] == [((1, number + 1),)]
    assert dropped == 0


def test_spans_before_a_push_have_the_number_that_it_gets() -> None:
    recorder, _ = recording()
    recorder.open_push(4, 1)  # the model is registered
    for number in range(1, 4):
        recorder.add_of_step("compute", 100.0)
        recorder.open_push(4, number)
        recorder.add_of_step("scatter", 100.0)
        recorder.finish_step()

    spans, _ = recorder.take()
    assert [span.pushes for span in spans] == [((4, n),) for n in (1, 1, 2, 2, 3, 3)]


def test_a_rejoined_worker_begins_with_its_first_push() -> None:
    recorder, _ = recording()
    recorder.open_push(4, 17)

    recorder.open_push(9, 1)

    assert recorder.step == (9, 1)


def test_spans_travel_unchanged() -> None:
    spans = [
        Span("receive", 12345.678901, 0.5, ((3, 9),), 0, 0, "stream-0"),
        Span("apply", 12345.7, 0.25, ((3, 9), (4, 8)), 17, 0, "link"),
        Span("log", 12345.8, 0.125),
    ]

    found = decode_spans("shard", 1, encode_spans(spans, 2, ClockOffset(-5.0, 0.001)))

    assert found.spans == spans
    assert (found.role, found.number) == ("shard", 1)
    assert (found.offset_seconds, found.uncertainty_seconds) == (-5.0, 0.001)
    assert found.dropped_steps == 2


def test_an_unknown_offset_travels_as_unknown() -> None:
    assert decode_spans("worker", 1, encode_spans([])).uncertainty_seconds is None


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff",
        co.SpanBatch(name=[0], thread=[0], began=[1.0]).SerializeToString(),
        co.SpanBatch(
            name=[1], thread=[0], began=[1.0], seconds=[1.0], version=[0], shard=[0], pushes=[0]
        ).SerializeToString(),
        co.SpanBatch(worker=[1], push=[1]).SerializeToString(),
    ],
)
def test_what_is_no_batch_is_refused(data: bytes) -> None:
    with pytest.raises(PSError, match="the spans of worker 3 cannot be read"):
        decode_spans("worker", 3, data)


def test_the_shortest_round_trip_gives_the_offset() -> None:
    estimate = OffsetEstimate()
    assert estimate.best is None

    estimate.add(sent=10.0, received=10.4, other=1010.3)  # slow on the way there
    estimate.add(sent=11.0, received=11.02, other=1011.01)
    estimate.add(sent=12.0, received=12.5, other=1012.0)

    assert estimate.best == pytest.approx((1000.0, 0.01))


def test_a_jump_of_a_clock_ends_what_was_known_before() -> None:
    """The machine was suspended for an hour; its monotonic clock stood still."""
    estimate = OffsetEstimate()
    estimate.add(sent=10.0, received=10.01, other=1010.0)

    estimate.add(sent=11.0, received=11.5, other=4611.2)

    assert estimate.best == pytest.approx((4599.95, 0.25))


def test_drift_is_no_jump() -> None:
    estimate = OffsetEstimate()
    estimate.add(sent=10.0, received=10.001, other=1010.0)

    estimate.add(sent=35.0, received=35.002, other=1035.003)

    assert estimate.best == pytest.approx((999.9995, 0.0005))


def test_old_round_trips_do_not_count() -> None:
    estimate = OffsetEstimate()
    estimate.add(sent=10.0, received=10.01, other=0.0)

    estimate.add(sent=50.0, received=50.2, other=60.1)

    assert estimate.best == pytest.approx((10.0, 0.1))
