"""Which bytes of the worker's tapes go to and come from which shard, in the order of the wire."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pscommon.core.errors import InvalidRequestError
from pscommon.core.tape import Plan, Range
from psproto.v1 import parameter_server_pb2 as ps
from psworker.exchange import ShardExchange
from psworker.lane import Cancellation, Lane
from psworker.patience import Limits


@dataclass(frozen=True)
class Move:
    """Tapes of plan.nbytes to send from and to receive into; None: nothing. everything: frozen tensors travel as well.

    absent: indices of trainable tensors whose bytes are not sent. InvalidRequestError for tapes that do not fit.
    """

    plan: Plan
    gradients: memoryview | None = None
    weights: memoryview | None = None
    absent: frozenset[int] = frozenset()
    everything: bool = False

    def __post_init__(self) -> None:
        if self.gradients is None and self.weights is None:
            raise InvalidRequestError("neither a push nor a pull")
        for tape in (self.gradients, self.weights):
            if tape is not None and (tape.nbytes != self.plan.nbytes or tape.format != "B"):
                raise InvalidRequestError(f"a tape of this model is {self.plan.nbytes} bytes, not {tape.nbytes}")
        if self.weights is not None and self.weights.readonly:
            raise InvalidRequestError("the tape for the weights cannot be written to")
        for index in self.absent:
            if not 0 <= index < len(self.plan.spec.tensors) or self.plan.spec.tensors[index].role != "trainable":
                raise InvalidRequestError(f"tensor {index} cannot be absent: it is not trainable", "UNKNOWN_TENSOR")

    def sent(self, shard: int) -> list[memoryview]:
        """What the shard gets, in the order of the wire."""
        if self.gradients is None:
            return []
        trainable = self.plan.without(self.plan.range(shard, "trainable"), self.absent)
        return _cut(self.gradients, [*trainable, *self._others(shard)])

    def received(self, shard: int) -> list[memoryview]:
        """Where to write what the shard sends."""
        if self.weights is None:
            return []
        return _cut(self.weights, [self.plan.range(shard, "trainable"), *self._others(shard)])

    def _others(self, shard: int) -> Iterator[Range]:
        yield self.plan.range(shard, "buffer")
        if self.everything:
            yield self.plan.range(shard, "frozen")


def shard_exchanges(
    lane: Lane, move: Move, header: ps.PushPullHeader, limits: Limits, cancellation: Cancellation, repeats: bool
) -> list[ShardExchange]:
    """One part for each shard, with the header for its own."""
    return [
        ShardExchange(lane, shard, _copy(header), move.sent(shard), move.received(shard), limits, cancellation, repeats)
        for shard in range(move.plan.shards)
    ]


def digest_of(move: Move, content: bytes) -> bytes:
    """Equal for two pushes exactly when they send the same bytes and the same `content` (of the header)."""
    digest = hashlib.blake2b(content)
    for shard in range(move.plan.shards):
        for view in move.sent(shard):
            digest.update(view)
    return digest.digest()


def _copy(header: ps.PushPullHeader) -> ps.PushPullHeader:
    copy = ps.PushPullHeader()
    copy.CopyFrom(header)
    return copy


def _cut(tape: memoryview, ranges: Sequence[Range]) -> list[memoryview]:
    return [tape[start:stop] for start, stop in ranges if start < stop]
