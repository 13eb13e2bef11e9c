"""Which bytes of the worker's tapes go to and come from which shard, in the order of the wire."""

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
    """Tapes of plan.nbytes to send from and to receive into; None: nothing. everything: frozen
    tensors travel as well.

    absent: indices of trainable tensors whose bytes are not sent. InvalidRequestError for tapes
    that do not fit.
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
        """Where on the tape lies what the shard gets, in the order of the wire."""
        return [
            *self.plan.without(self.plan.range(shard, "trainable"), self.absent),
            *self._others(shard),
        ]

    def incoming(self, shard: int, unchanged: Collection[int] = ()) -> list[ByteRange]:
        """Where on the tape belongs what the shard sends: all but the tensors in `unchanged`.

        Buffers come first: a forward that waits layer by layer needs those of its first layer soon.
        """
        buffers, *frozen = self._others(shard)
        return [
            buffers,
            *self.plan.without(self.plan.range(shard, "trainable"), unchanged),
            *frozen,
        ]

    def sent(self, shard: int) -> list[memoryview]:
        """What the shard gets."""
        return _cut(self.gradients, self.outgoing(shard)) if self.gradients is not None else []

    def received(self, shard: int, unchanged: Collection[int] = ()) -> list[memoryview]:
        """Where to write what the shard sends."""
        return (
            _cut(self.weights, self.incoming(shard, unchanged)) if self.weights is not None else []
        )

    def _others(self, shard: int) -> Iterator[ByteRange]:
        yield self.plan.range(shard, "buffer")
        if self.everything:
            yield self.plan.range(shard, "frozen")


class ShardExchangeFactory:
    """Makes one part for each shard. in_memory: shards that find the bytes in shared memory
    `memory`.

    have: the version that the weights' tape holds, by shard.
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
        """A copy for this shard."""
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
    """Equal for two pushes exactly when they send the same bytes and the same `content` (of the
    header).

    To however many shards: the job may move to another number of them between the two.
    """
    plan, digest = move.plan, hashlib.blake2b(content)
    sections = [*plan.without(plan.section("trainable"), move.absent), plan.section("buffer")]
    for view in _cut(move.gradients, sections) if move.gradients is not None else ():
        digest.update(view)
    return digest.digest()


def _cut(tape: memoryview, ranges: Sequence[ByteRange]) -> list[memoryview]:
    return [tape[start:stop] for start, stop in ranges if start < stop]
