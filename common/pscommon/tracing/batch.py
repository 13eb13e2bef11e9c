"""Spans as bytes: columns of a protobuf message, which only ps-ctl decodes."""

from collections.abc import Sequence
from itertools import pairwise

from google.protobuf.message import DecodeError

from pscommon.core.errors import PSError
from pscommon.tracing.clock_offset import ClockOffset
from pscommon.tracing.spans import ProcessSpans, Span
from psproto.v1 import coordinator_pb2 as co


def encode_spans(
    spans: Sequence[Span], dropped_steps: int = 0, offset: ClockOffset | None = None
) -> bytes:
    """Return the bytes of a SpanBatch.

    Args:
        dropped_steps: Steps of which not all spans are here.
        offset: Of the clock of `spans`; None if it is not known.
    """
    batch = co.SpanBatch(dropped_steps=dropped_steps)
    if offset is not None:
        batch.offset_seconds, batch.uncertainty_seconds = offset
    if spans:
        names, began, seconds, pushes, versions, shards, threads = zip(*spans, strict=True)
        numbers = {text: index for index, text in enumerate(dict.fromkeys((*names, *threads)))}
        batch.texts.extend(numbers)
        batch.name.extend(map(numbers.__getitem__, names))
        batch.thread.extend(map(numbers.__getitem__, threads))
        batch.began.extend(began)
        batch.seconds.extend(seconds)
        batch.version.extend(versions)
        batch.shard.extend(shards)
        batch.pushes.extend(map(len, pushes))
        batch.worker.extend(worker for each in pushes for worker, _ in each)
        batch.push.extend(push for each in pushes for _, push in each)
    return batch.SerializeToString()


def decode_spans(role: str, number: int, data: bytes) -> ProcessSpans:
    """Return the spans of a SpanBatch.

    Raises:
        PSError: The bytes are no SpanBatch.
    """
    try:
        batch = co.SpanBatch.FromString(data)
        texts = list(batch.texts)
        ends = [0]
        for count in batch.pushes:
            ends.append(ends[-1] + count)
        pushes = list(zip(batch.worker, batch.push, strict=True))
        if ends[-1] != len(pushes):
            raise ValueError("the numbers of pushes do not add up")
        spans = [
            Span(
                texts[name],
                began,
                seconds,
                tuple(pushes[first:last]),
                version,
                shard,
                texts[thread],
            )
            for name, began, seconds, (first, last), version, shard, thread in zip(
                batch.name,
                batch.began,
                batch.seconds,
                pairwise(ends),
                batch.version,
                batch.shard,
                batch.thread,
                strict=True,
            )
        ]
    except (DecodeError, IndexError, ValueError) as error:
        raise PSError(f"the spans of {role} {number} cannot be read: {error}") from error
    return ProcessSpans(
        role,
        number,
        spans,
        batch.offset_seconds,
        batch.uncertainty_seconds if batch.HasField("uncertainty_seconds") else None,
        batch.dropped_steps,
    )
