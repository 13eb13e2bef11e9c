"""A push that leaves while its gradients are still being made, and weights that are used while
others still arrive.

Each shard has a call of its own, in a thread of its own. It is open from `begin` on: what `send`
names goes out at once, in any order; `finish` sends what has not gone and closes the push.
Should a call fail, everything is sent again in the usual way once the push is finished. Shards
that share memory with this worker need no call before that.
"""

import queue
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from pscommon.core.errors import InvalidRequestError, PSError
from pscommon.core.log_entries import BatchKey
from pscommon.core.partition import ByteRange, PartitionPlan
from pscommon.system import signals as interruptible
from pscommon.wire import messages as codec
from pscommon.wire.channel import FRAME_BYTES
from pscommon.wire.frames import encode_data, encode_header
from psproto.v1 import parameter_server_pb2 as ps
from psworker.connection.retry import TimeLimits
from psworker.core.results import PushResult
from psworker.exchange.shard_exchange import STATUS, ShardExchange, combined
from psworker.exchange.transfer import ShardExchangeFactory, ShardTransfer
from psworker.transport.streams import AnswerReceiver, Cancellation, ExchangeAnswer

if TYPE_CHECKING:
    from psworker.exchange.model_exchange import ModelExchange

LONGEST_BACKWARD = 24 * 3600.0
"""Deadline in seconds of a call that is open while the script computes; a server that is gone is
noticed by pings.
"""

TURN_SECONDS = 0.2


class ShardUpload:
    """One shard's bytes of a push that is not complete yet."""

    def __init__(self, plan: PartitionPlan, shard: int, gradients: memoryview) -> None:
        self._ranges = plan.range(shard, "trainable"), plan.range(shard, "buffer")
        self._tape = gradients
        self._orders: queue.SimpleQueue[ByteRange | ps.PushPullHeader | None] = queue.SimpleQueue()
        self._sent: list[ByteRange] = []
        self.closed = threading.Event()
        self.header: ps.PushPullHeader | None = None
        self.views: Sequence[memoryview] = ()

    def send(self, span: ByteRange) -> None:
        """What lies on this shard of a stretch of the tape."""
        for held in self._ranges:
            start, stop = max(span.start, held.start), min(span.stop, held.stop)
            if start < stop:
                self._sent.append(ByteRange(start, stop))
                self._orders.put(ByteRange(start, stop))

    def close(
        self, header: ps.PushPullHeader, views: Sequence[memoryview], needed: Sequence[ByteRange]
    ) -> None:
        """Sends what is needed and has not gone, and the header that closes the push; views: all
        bytes of it.
        """
        for span in needed:
            for missing in _without(span, self._sent):
                self.send(missing)
        self.header, self.views = header, views
        self._orders.put(header)
        self.closed.set()

    def give_up(self) -> None:
        """There will be no push. Harmless to repeat, and after close."""
        self._orders.put(None)
        self.closed.set()

    def frames(self, header: ps.PushPullHeader) -> Iterator[bytes]:
        yield encode_header(header)
        while (order := self._orders.get()) is not None:
            if isinstance(order, ps.PushPullHeader):
                yield encode_header(order)
                return
            for start in range(order.start, order.stop, FRAME_BYTES):
                stop = min(start + FRAME_BYTES, order.stop)
                yield encode_data(self._tape[start:stop], offset=self._offset(start))

    def _offset(self, position: int) -> int:
        trainable, buffers = self._ranges
        if trainable.start <= position < trainable.stop:
            return position - trainable.start
        return trainable.nbytes + position - buffers.start


def _without(span: ByteRange, sent: Sequence[ByteRange]) -> Iterator[ByteRange]:
    """The parts of a stretch that are in none of the others."""
    position = span.start
    for start, stop in sorted(sent):
        if stop <= position or start >= span.stop:
            continue
        if start > position:
            yield ByteRange(position, start)
        position = max(position, stop)
    if position < span.stop:
        yield ByteRange(position, span.stop)


class OpenShardExchange(ShardExchange):
    """A shard's part whose first attempt begins before the push is complete."""

    opening: ShardUpload
    _complete = False

    def _attempt(self, wait: float) -> ExchangeAnswer:
        opening = self.opening
        if not self._attempts and not self._header.memory and not opening.closed.is_set():
            return self._first_attempt(wait)
        if not self._complete:
            self._wait_for_close()
        return super()._attempt(wait)

    def _first_attempt(self, wait: float) -> ExchangeAnswer:
        self._attempts += 1
        self._header.open, self._header.wait_ms = True, round(wait * 1000)
        frames = self.opening.frames(self._header)
        self._patience.answered()  # it waits for the script: see `expected`
        try:
            return self._lane.exchange(
                self._shard,
                self._header,
                (),
                self._receiver,
                LONGEST_BACKWARD,
                self._cancellation,
                frames,
            )
        finally:
            self._patience.progress()  # the script has computed all this while: that was no silence

    def expected(self) -> None:
        """The push is being closed, so it is the server's turn."""
        self._patience.asked()

    def over(self) -> None:
        """Nobody expects anything of it any more."""
        self._patience.answered()

    def _wait_for_close(self) -> None:
        """Takes over what the push has become."""
        self._patience.answered()
        self.opening.closed.wait()
        self._patience.asked()
        if self.opening.header is None:
            raise PSError("the push was given up")
        self._send, self._complete = self.opening.views, True
        self._header.MergeFrom(self.opening.header)
        self._header.open = False
        self._patience.progress()


class ShardDownload(AnswerReceiver):
    """Tells the flow what a shard has answered so far. order: the ranges of the tape that come,
    in their order.
    """

    def __init__(self, flow: "OpenPush", move: ShardTransfer, shard: int) -> None:
        super().__init__(partial(_views, move, shard))
        self._flow = flow
        self._move, self._shard = move, shard
        self.result: ps.ExchangeResult | None = None
        self.nbytes = 0
        self.order: Sequence[ByteRange] = ()

    def begin(self, result: ps.ExchangeResult) -> Sequence[memoryview]:
        with self._flow.changed:
            if STATUS.get(result.outcome):
                self.result, self.nbytes = result, 0
                self.order = (
                    self._move.incoming(self._shard, result.unchanged) if result.nbytes else ()
                )
            self._flow.changed.notify_all()
        return super().begin(result)

    def arrived(self, nbytes: int) -> None:
        with self._flow.changed:
            self.nbytes = nbytes
            self._flow.changed.notify_all()

    def has(self, span: ByteRange) -> bool:
        """Is what comes of this stretch of the tape here?"""
        before = 0
        for start, stop in self.order:
            if (
                start < span.stop
                and span.start < stop
                and self.nbytes < before + min(stop, span.stop) - start
            ):
                return False
            before += stop - start
        return True


def _views(move: ShardTransfer, shard: int, result: ps.ExchangeResult) -> Sequence[memoryview]:
    return move.received(shard, result.unchanged)


class OpenPush:
    """What Client.begin returns; see `psworker.client.local_client.Flow`. One thread at a time
    may use it.
    """

    def __init__(
        self, model: "ModelExchange", move: ShardTransfer, header: ps.PushPullHeader
    ) -> None:
        self._guard = threading.RLock()
        self.changed = threading.Condition(self._guard)
        self.header = header
        self._model, self._move = model, move
        self._plan = move.plan
        self._arrivals = [ShardDownload(self, move, shard) for shard in range(move.plan.shards)]
        assert move.gradients is not None
        self._openings = [
            ShardUpload(move.plan, shard, move.gradients) for shard in range(move.plan.shards)
        ]
        self.parts: Sequence[ShardExchange] = ()
        self.resent = False  # all of it went to another number of servers, and has come from there
        self._opened: list[OpenShardExchange] = []
        self._over = False
        self._error: BaseException | None = None
        self._finished = False
        self._cancellation = Cancellation()
        self._thread = threading.Thread(target=self._run, name="psworker-flow", daemon=True)

    def start(self) -> None:
        """From now on what is sent goes."""
        with interruptible.deferred(lambda _: None):
            self._thread.start()

    def send(self, start: int, stop: int) -> None:
        """Bytes [start, stop) of the gradients' tape may go now; again: what went before is
        replaced. Never blocks.
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
        """The rest goes. Returns how the push ended; its weights may still be arriving."""
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
        self._model.touch()
        self._model.tapes.take_in(move)
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
        self._model.decided(result)
        return result

    def wait(self, start: int, stop: int) -> None:
        """Until bytes [start, stop) of the weights' tape are here; raises what an exchange would
        raise.
        """
        if not self._finished:
            raise InvalidRequestError("no weights come before this push is finished")
        span, tapes = ByteRange(start, stop), self._model.tapes
        copied = bool(tapes.shards) and self._move.weights is not tapes.weights
        self._until(lambda: not copied and all(arrival.has(span) for arrival in self._arrivals))

    def close(self) -> None:
        """Waits for all of it. Of a push that is not finished, or has failed: gives it up.
        Harmless to repeat.
        """
        self._finished = True
        with interruptible.deferred(lambda _: None):
            for opening in self._openings:
                if not opening.closed.is_set():
                    opening.give_up()
        interruptible.join(self._thread)
        self._model.closed(self)

    def abandon(self) -> None:
        """Close without waiting for anybody: the client is being closed."""
        self._cancellation.cancel(InvalidRequestError("this Client is closed"))
        self.close()

    def open_parts(
        self, exchanges: ShardExchangeFactory, limits: TimeLimits, cancellation: Cancellation
    ) -> list[OpenShardExchange]:
        """One for each shard, to be run at the same time."""
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
        """By this, from now on."""
        self._cancellation = cancellation

    def closed(self) -> tuple[ShardTransfer, ps.PushPullHeader]:
        """The whole push, once the script has finished it; PSError if it gives it up."""
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
        """Have all shards said how the push ended?"""
        return all(arrival.result is not None for arrival in self._arrivals)

    @property
    def may_count(self) -> bool:
        """Is there a server that can have all of it?"""
        return any(opening.header is not None for opening in self._openings)

    def _until(self, done: Callable[[], bool]) -> None:
        with (
            self._guard
        ):  # most waits end here; Ctrl-C cannot break into its being taken, as into a condition's
            ends = self._over or done()
        try:
            if not ends:
                with (
                    interruptible.deferred(lambda interrupt: self._cancellation.cancel(interrupt)),
                    self.changed,
                ):
                    while not self._over and not done():
                        self.changed.wait(TURN_SECONDS)
        except (
            BaseException
        ) as interrupt:  # the second Ctrl-C: end the calls, or close would wait for them
            self._cancellation.cancel(interrupt)
            raise
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._model.carry(self, self._move)
        except BaseException as error:
            self._error = error
        with self.changed:
            self._over = True
            for part in self._opened:
                part.over()
            self.changed.notify_all()
