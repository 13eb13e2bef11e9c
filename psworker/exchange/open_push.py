"""A push that starts before all its gradients exist, with weights that arrive in pieces.

Theory of operation:

- States: open (from `begin`), finished (`finish`), decided (all shards have answered), closed.
- Each shard has its own call. The calls run at the same time.
- Open: `send` puts byte ranges on the wire at once, in any order.
- Finished: `finish` sends the bytes that are still missing, then the closing header.
- Decided: `wait` returns as soon as a byte range of the weights has arrived.
- A failed call is retried as an ordinary exchange, once the push is finished.
- A shard that shares memory with this worker gets no call before the push is finished.
"""

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from pscommon.core.errors import InvalidRequestError, PSError
from pscommon.core.log_entries import BatchKey
from pscommon.core.partition import ByteRange
from pscommon.system import signals as interruptible
from pscommon.wire import messages as codec
from psproto.v1 import parameter_server_pb2 as ps
from psworker.connection.retry import TimeLimits
from psworker.core.results import PushResult
from psworker.exchange.open_shard_exchange import (
    OpenShardExchange,
    ShardDownload,
    ShardUpload,
)
from psworker.exchange.shard_exchange import ShardExchange, combined
from psworker.exchange.shared_buffers import ClientBuffers
from psworker.exchange.transfer import ShardExchangeFactory, ShardTransfer
from psworker.transport.streams import Cancellation

TURN_SECONDS = 0.2


class PushSteps(NamedTuple):
    """What the steps of an open push mean for the model's exchange.

    Attributes:
        run: Exchanges with all shards until the push ends; runs in the push's thread.
        begin_finish: The script completes the push.
        record_decision: All shards have decided on the push.
        release: The script closes the push. May be called again.
    """

    run: Callable[["OpenPush", ShardTransfer], None]
    begin_finish: Callable[[], None]
    record_decision: Callable[[PushResult], None]
    release: Callable[["OpenPush"], None]


class OpenPush:
    """The result of `Client.begin`; see `psworker.core.protocols.PushStream`.

    Not thread-safe: one thread at a time may call it.

    Attributes:
        changed: Notified when bytes or an answer arrive, and when the push's thread ends.
        header: Header of the push without the fields that `finish` sets.
        parts: The exchange of each shard, by shard.
        resent: The whole push went to another number of shards, and the weights came from there.
    """

    def __init__(
        self,
        steps: PushSteps,
        buffers: ClientBuffers,
        move: ShardTransfer,
        header: ps.PushPullHeader,
    ) -> None:
        self._guard = threading.RLock()
        self.changed = threading.Condition(self._guard)
        self.header = header
        self._steps, self._buffers, self._move = steps, buffers, move
        self._plan = move.plan
        self._arrivals = [
            ShardDownload(self.changed, move, shard) for shard in range(move.plan.shards)
        ]
        assert move.gradients is not None
        self._openings = [
            ShardUpload(move.plan, shard, move.gradients) for shard in range(move.plan.shards)
        ]
        self.parts: Sequence[ShardExchange] = ()
        self.resent = False
        self._opened: list[OpenShardExchange] = []
        self._over = False
        self._error: BaseException | None = None
        self._finished = False
        self._cancellation = Cancellation()
        self._thread = threading.Thread(target=self._run, name="psworker-flow", daemon=True)

    def start(self) -> None:
        """Start the push's thread, which sends what `send` queues."""
        with interruptible.deferred(lambda _: None):
            self._thread.start()

    def send(self, start: int, stop: int) -> None:
        """Queue bytes [start, stop) of the gradient buffer for sending; never blocks.

        Bytes that were sent before are replaced.
        """
        for opening in self._openings:
            opening.send(ByteRange(start, stop))

    def finish(
        self,
        *,
        absent: Collection[int] = (),
        samples: int = 1,
        batches: Sequence[BatchKey] = (),
        groups_json: str = "",
    ) -> PushResult:
        """Send the rest and return the outcome of the push; its weights may still be arriving."""
        if self._finished or samples < 1:
            raise InvalidRequestError(
                "this push is finished" if self._finished else f"samples={samples} < 1"
            )
        move = ShardTransfer(self._plan, self._move.gradients, None, frozenset(absent))
        self._finished = True
        header = ps.PushPullHeader(
            samples=samples,
            batches=codec.batches_to_proto(batches),
            absent=sorted(absent),
            groups_json=groups_json,
        )
        self._steps.begin_finish()
        self._buffers.take_in(move)
        with interruptible.deferred(lambda _: None):
            with self.changed:
                for part in () if self._over else self._opened:
                    part.expected()
            for shard, opening in enumerate(self._openings):
                opening.close(header, move.sent(shard), move.outgoing(shard))
        self._until(lambda: self.decided)
        for part, arrival in zip(self._opened, self._arrivals, strict=True):
            if arrival.result is not None and not self.resent:
                part.decide(arrival.result)
        result = combined(self.parts)
        self._steps.record_decision(result)
        return result

    def wait(self, start: int, stop: int) -> None:
        """Wait for bytes [start, stop) of the weights buffer; raise what an exchange raises."""
        if not self._finished:
            raise InvalidRequestError("no weights come before this push is finished")
        span, tapes = ByteRange(start, stop), self._buffers
        copied = bool(tapes.shards) and self._move.weights is not tapes.weights
        self._until(lambda: not copied and all(arrival.has(span) for arrival in self._arrivals))

    def close(self) -> None:
        """Wait until all weights have arrived; give up a push that is not finished or has failed.

        May be called again.
        """
        self._finished = True
        with interruptible.deferred(lambda _: None):
            for opening in self._openings:
                if not opening.closed.is_set():
                    opening.give_up()
        interruptible.join(self._thread)
        self._steps.release(self)

    def abandon(self) -> None:
        """Cancel the calls and close: the client is being closed."""
        self._cancellation.cancel(InvalidRequestError("this Client is closed"))
        self.close()

    def open_parts(
        self, exchanges: ShardExchangeFactory, limits: TimeLimits, cancellation: Cancellation
    ) -> list[OpenShardExchange]:
        """Return one exchange per shard, to be run at the same time."""
        self._cancellation = cancellation
        self.parts = self._opened = [
            OpenShardExchange(
                exchanges.lane,
                shard,
                exchanges.header(shard, self.header),
                (),
                arrival,
                limits,
                cancellation,
            )
            for shard, arrival in enumerate(self._arrivals)
        ]
        for part, opening in zip(self._opened, self._openings, strict=True):
            part.opening = opening
        return self._opened

    def can_be_given_up(self, cancellation: Cancellation) -> None:
        """Set the Cancellation that ends the calls of this push."""
        self._cancellation = cancellation

    def closed(self) -> tuple[ShardTransfer, ps.PushPullHeader]:
        """Wait until the script has finished the push, and return all of it.

        Raises PSError if the script gives it up.
        """
        for opening in self._openings:
            opening.closed.wait()
        closing = self._openings[0].header
        if closing is None:
            raise PSError("the push was given up")
        header = ps.PushPullHeader()
        header.CopyFrom(self.header)
        header.MergeFrom(closing)
        return replace(self._move, absent=frozenset(closing.absent)), header

    @property
    def decided(self) -> bool:
        """True once all shards have answered with the outcome of the push."""
        return all(arrival.result is not None for arrival in self._arrivals)

    @property
    def may_count(self) -> bool:
        """True if a server may have received the whole push."""
        return any(opening.header is not None for opening in self._openings)

    def _until(self, done: Callable[[], bool]) -> None:
        # Most waits end here. Ctrl-C cannot interrupt the acquisition of this lock, as it can
        # interrupt that of a condition.
        with self._guard:
            ends = self._over or done()
        try:
            if not ends:
                with (
                    interruptible.deferred(lambda interrupt: self._cancellation.cancel(interrupt)),
                    self.changed,
                ):
                    while not self._over and not done():
                        self.changed.wait(TURN_SECONDS)
        except BaseException as interrupt:
            # The second Ctrl-C: without this, `close` would wait for the calls.
            self._cancellation.cancel(interrupt)
            raise
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._steps.run(self, self._move)
        except BaseException as error:
            self._error = error
        with self.changed:
            self._over = True
            for part in self._opened:
                part.over()
            self.changed.notify_all()
