"""Flat buffers, their byte ranges by shard in wire order, and the status of an outcome."""

import hashlib
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pscommon.core.errors import InvalidRequestError
from pscommon.core.partition import ByteRange, PartitionPlan
from pscommon.wire.push import Part
from psproto.v1 import parameter_server_pb2 as ps
from psworker.core.results import Status

STATUS: Mapping[int, Status] = {
    ps.OUTCOME_NONE: "none",
    ps.OUTCOME_APPLIED: "applied",
    ps.OUTCOME_DUPLICATE: "duplicate",
    ps.OUTCOME_STALE: "stale",
    ps.OUTCOME_REJECTED: "rejected",
}
"""Status of a push by the outcome in a shard's answer; a pending push has none."""


class ScatteredBuffer:
    """Bytes of a flat buffer, of which some ranges lie elsewhere, which saves a copy.

    Attributes:
        nbytes: Size of the flat buffer.
        readonly: Whether a part cannot be written.
        format: "B", as of a memoryview of bytes.
    """

    format = "B"

    def __init__(self, flat: memoryview, parts: Mapping[int, memoryview]) -> None:
        """Create the buffer.

        Args:
            flat: The bytes that lie in no part.
            parts: Bytes by their position in the flat buffer; they do not overlap.
        """
        self.nbytes = flat.nbytes
        self.readonly = flat.readonly or any(part.readonly for part in parts.values())
        self._flat = flat
        self._starts = sorted(parts)
        self._parts = [parts[start] for start in self._starts]

    def cut(self, span: ByteRange) -> Iterator[memoryview]:
        """Yield the memory of a byte range, in order."""
        position = span.start
        for index in range(max(0, bisect_right(self._starts, position) - 1), len(self._starts)):
            start, part = self._starts[index], self._parts[index]
            if start >= span.stop:
                break
            if position < start:
                yield self._flat[position:start]
                position = start
            if position < (stop := min(start + part.nbytes, span.stop)):
                yield part[position - start : stop - start]
                position = stop
        if position < span.stop:
            yield self._flat[position : span.stop]


ExchangeBuffer = memoryview | ScatteredBuffer


class ShardPart(NamedTuple):
    """One shard's part of a transfer.

    Attributes:
        sent: The bytes to send to the shard.
        received: Memory for the bytes of its answer.
        nbytes: Size of both.
    """

    sent: Sequence[memoryview]
    received: Sequence[memoryview]
    nbytes: int


@dataclass(frozen=True)
class ShardTransfer:
    """Flat buffers to send from and to receive into. Many steps use one transfer.

    Attributes:
        plan: Partition of the model.
        gradients: Bytes to send, plan.nbytes of them; None: no push.
        weights: Writable bytes to receive into, plan.nbytes of them; None: no pull.
        absent: Indices of trainable tensors whose bytes are not sent.
        everything: Transfer frozen tensors as well.
        states: Of an upload, the bytes of each optimizer state, which lie like the trainable
            tensors; None: it is no upload.

    Raises:
        InvalidRequestError: A buffer or an index does not fit the model.
    """

    plan: PartitionPlan
    gradients: ExchangeBuffer | None = None
    weights: ExchangeBuffer | None = None
    absent: frozenset[int] = frozenset()
    everything: bool = False
    states: Mapping[str, memoryview] | None = None

    def __post_init__(self) -> None:
        if self.gradients is None and self.weights is None:
            raise InvalidRequestError("an exchange needs gradients, weights, or both")
        for buffer in (self.gradients, self.weights):
            if buffer is not None and (buffer.nbytes != self.plan.nbytes or buffer.format != "B"):
                raise InvalidRequestError(
                    f"a flat buffer of this model has {self.plan.nbytes} bytes (format B), not "
                    f"{buffer.nbytes} (format {buffer.format})"
                )
        if self.weights is not None and self.weights.readonly:
            raise InvalidRequestError("the flat buffer for the weights is read-only")
        for index in self.absent:
            if (
                not 0 <= index < len(self.plan.spec.tensors)
                or self.plan.spec.tensors[index].role != "trainable"
            ):
                raise InvalidRequestError(
                    f"tensor {index} cannot be absent: it is not trainable", "UNKNOWN_TENSOR"
                )

    def outgoing(self, shard: int) -> list[ByteRange]:
        """Return the byte ranges to send to the shard, in wire order."""
        return [
            *self.plan.without(self.plan.range(shard, "trainable"), self.absent),
            *self._others(shard),
        ]

    def incoming(self, shard: int, unchanged: Collection[int] = ()) -> list[ByteRange]:
        """Return the byte ranges to receive from the shard, in wire order.

        Buffers come first: a forward pass that waits layer by layer needs its first ones soon.

        unchanged: Indices of tensors that the shard does not send.
        """
        buffers, *frozen = self._others(shard)
        return [
            buffers,
            *self.plan.without(self.plan.range(shard, "trainable"), unchanged),
            *frozen,
        ]

    def sent(self, shard: int) -> list[memoryview]:
        """Return the bytes to send to the shard; empty without a push."""
        if self.gradients is None:
            return []
        found = _cut(self.gradients, self.outgoing(shard))
        for state in (self.states or {}).values():
            found += _cut(state, [self.plan.range(shard, "trainable")])
        return found

    def named_parts(self, shard: int) -> Sequence[Part]:
        """Return the parts of an upload, in the order of `sent`."""
        if self.states is None:
            return ()
        weights, trainable = (
            tuple(span for span in spans if span.nbytes)
            for spans in (self.outgoing(shard), [self.plan.range(shard, "trainable")])
        )
        states = (Part(trainable, ps.TARGET_STATE, state=name) for name in self.states)
        return [Part(weights), *states]

    def received(self, shard: int, unchanged: Collection[int] = ()) -> list[memoryview]:
        """Return the memory for the shard's bytes; empty without a pull."""
        return (
            _cut(self.weights, self.incoming(shard, unchanged)) if self.weights is not None else []
        )

    @cached_property
    def parts(self) -> list[ShardPart]:
        """The parts of all shards, if no tensor is unchanged."""
        pairs = [(self.sent(shard), self.received(shard)) for shard in range(self.plan.shards)]
        return [
            ShardPart(sent, received, sum(view.nbytes for view in (*sent, *received)))
            for sent, received in pairs
        ]

    def views(self, shard: int, result: ps.ExchangeResult) -> Sequence[memoryview]:
        """Return the memory for the bytes of this answer of the shard."""
        unchanged = result.unchanged
        return self.received(shard, unchanged) if unchanged else self.parts[shard].received

    def _others(self, shard: int) -> Iterator[ByteRange]:
        yield self.plan.range(shard, "buffer")
        if self.everything:
            yield self.plan.range(shard, "frozen")


class EmptyTransfer(ShardTransfer):
    """A push without bytes."""

    def outgoing(self, shard: int) -> list[ByteRange]:
        return []


def digest_of(transfer: ShardTransfer, content: bytes) -> bytes:
    """Return a digest of a push's bytes and of `content`, the serialized header.

    It does not depend on the partition: the number of shards may change before a retry.
    """
    plan, digest = transfer.plan, hashlib.blake2b(content)
    sections = [*plan.without(plan.section("trainable"), transfer.absent), plan.section("buffer")]
    for view in _cut(transfer.gradients, sections) if transfer.gradients is not None else ():
        digest.update(view)
    return digest.digest()


def _cut(buffer: ExchangeBuffer, ranges: Sequence[ByteRange]) -> list[memoryview]:
    if isinstance(buffer, ScatteredBuffer):
        return [view for span in ranges for view in buffer.cut(span)]
    return [buffer[start:stop] for start, stop in ranges if start < stop]
