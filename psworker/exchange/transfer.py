"""Byte ranges of the worker's flat buffers by shard, in wire order."""

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from pscommon.core.errors import InvalidRequestError
from pscommon.core.partition import ByteRange, PartitionPlan
from psproto.v1 import parameter_server_pb2 as ps
from psworker.connection.retry import TimeLimits
from psworker.exchange.shard_exchange import SentBefore, ShardExchange
from psworker.transport.grpc import Transport
from psworker.transport.streams import AnswerReceiver, Cancellation


@dataclass(frozen=True)
class ShardTransfer:
    """Flat buffers to send from and to receive into.

    Attributes:
        plan: Partition of the model.
        gradients: Bytes to send, plan.nbytes of them; None: no push.
        weights: Writable bytes to receive into, plan.nbytes of them; None: no pull.
        absent: Indices of trainable tensors whose bytes are not sent.
        everything: Transfer frozen tensors as well.

    Raises:
        InvalidRequestError: A buffer or an index does not fit the model.
    """

    plan: PartitionPlan
    gradients: memoryview | None = None
    weights: memoryview | None = None
    absent: frozenset[int] = frozenset()
    everything: bool = False

    def __post_init__(self) -> None:
        if self.gradients is None and self.weights is None:
            raise InvalidRequestError("neither a push nor a pull")
        for tape in (self.gradients, self.weights):
            if tape is not None and (tape.nbytes != self.plan.nbytes or tape.format != "B"):
                raise InvalidRequestError(
                    f"a tape of this model is {self.plan.nbytes} bytes, not {tape.nbytes}"
                )
        if self.weights is not None and self.weights.readonly:
            raise InvalidRequestError("the tape for the weights cannot be written to")
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
        return _cut(self.gradients, self.outgoing(shard)) if self.gradients is not None else []

    def received(self, shard: int, unchanged: Collection[int] = ()) -> list[memoryview]:
        """Return the memory for the shard's bytes; empty without a pull."""
        return (
            _cut(self.weights, self.incoming(shard, unchanged)) if self.weights is not None else []
        )

    def _others(self, shard: int) -> Iterator[ByteRange]:
        yield self.plan.range(shard, "buffer")
        if self.everything:
            yield self.plan.range(shard, "frozen")


class ShardExchangeFactory:
    """Creates one `ShardExchange` per shard.

    Args:
        lane: Transport to the servers.
        move: Buffers of the transfer.
        memory: Number of the shared-memory offer; 0 if there is none.
        in_memory: Shards that have attached the shared memory.
        have: Version that the weights buffer holds, by shard; None: unknown.
    """

    def __init__(
        self,
        lane: Transport,
        move: ShardTransfer,
        memory: int = 0,
        in_memory: Collection[int] = (),
        have: Sequence[int] | None = None,
    ) -> None:
        self.lane, self._move = lane, move
        self._memory, self._in_memory = memory, in_memory
        self._have = have

    def parts(
        self,
        header: ps.PushPullHeader,
        limits: TimeLimits,
        cancellation: Cancellation,
        sent: SentBefore,
    ) -> list[ShardExchange]:
        return [
            self._part(shard, self.header(shard, header), limits, cancellation, sent)
            for shard in range(self._move.plan.shards)
        ]

    def _part(
        self,
        shard: int,
        header: ps.PushPullHeader,
        limits: TimeLimits,
        cancellation: Cancellation,
        sent: SentBefore,
    ) -> ShardExchange:
        receiver = AnswerReceiver(partial(_received, self._move, shard))
        return ShardExchange(
            self.lane, shard, header, self._move.sent(shard), receiver, limits, cancellation, sent
        )

    def header(self, shard: int, header: ps.PushPullHeader) -> ps.PushPullHeader:
        """Return a copy of the header with the fields of this shard."""
        own = ps.PushPullHeader()
        own.CopyFrom(header)
        own.memory = self._memory if shard in self._in_memory else 0
        own.shards = self._move.plan.shards
        if self._have is not None:
            own.have = self._have[shard]
        return own


def _received(move: ShardTransfer, shard: int, result: ps.ExchangeResult) -> list[memoryview]:
    return move.received(shard, result.unchanged)


def digest_of(move: ShardTransfer, content: bytes) -> bytes:
    """Return a digest of a push's bytes and of `content`, the serialized header.

    It does not depend on the partition: the number of shards may change before a retry.
    """
    plan, digest = move.plan, hashlib.blake2b(content)
    sections = [*plan.without(plan.section("trainable"), move.absent), plan.section("buffer")]
    for view in _cut(move.gradients, sections) if move.gradients is not None else ():
        digest.update(view)
    return digest.digest()


def _cut(tape: memoryview, ranges: Sequence[ByteRange]) -> list[memoryview]:
    return [tape[start:stop] for start, stop in ranges if start < stop]
