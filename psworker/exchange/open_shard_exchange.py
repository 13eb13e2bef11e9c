"""One shard's part of an open push: its gradients on their way out, its weights on their way in."""

import queue
import threading
from collections.abc import Iterator, Sequence
from functools import partial

from pscommon.core.errors import PSError
from pscommon.core.partition import ByteRange, PartitionPlan
from pscommon.wire.channel import FRAME_BYTES
from pscommon.wire.frames import encode_data, encode_header
from psproto.v1 import parameter_server_pb2 as ps
from psworker.exchange.shard_exchange import STATUS, ShardExchange
from psworker.exchange.transfer import ShardTransfer
from psworker.transport.streams import AnswerReceiver, ExchangeAnswer

LONGEST_BACKWARD = 24 * 3600.0
"""Deadline in seconds of a call that is open while the script computes; a server that is gone is
noticed by pings.
"""


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
        self._retry.end_attempt()  # it waits for the script: see `expected`
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
            self._retry.restart()  # the script has computed all this while: that was no silence

    def expected(self) -> None:
        """The push is being closed, so it is the server's turn."""
        self._retry.begin_attempt()

    def over(self) -> None:
        """Nobody expects anything of it any more."""
        self._retry.end_attempt()

    def _wait_for_close(self) -> None:
        """Takes over what the push has become."""
        self._retry.end_attempt()
        self.opening.closed.wait()
        self._retry.begin_attempt()
        if self.opening.header is None:
            raise PSError("the push was given up")
        self._send, self._complete = self.opening.views, True
        self._header.MergeFrom(self.opening.header)
        self._header.open = False
        self._retry.restart()


class ShardDownload(AnswerReceiver):
    """What a shard has answered to an open push so far.

    Attributes:
        order: The ranges of the flat buffer that arrive, in the order of arrival.
    """

    def __init__(self, changed: threading.Condition, move: ShardTransfer, shard: int) -> None:
        """changed: notified about each change here, and its lock guards all attributes."""
        super().__init__(partial(_views, move, shard))
        self._changed = changed
        self._move, self._shard = move, shard
        self.result: ps.ExchangeResult | None = None
        self.nbytes = 0
        self.order: Sequence[ByteRange] = ()

    def begin(self, result: ps.ExchangeResult) -> Sequence[memoryview]:
        with self._changed:
            if STATUS.get(result.outcome):
                self.result, self.nbytes = result, 0
                self.order = (
                    self._move.incoming(self._shard, result.unchanged) if result.nbytes else ()
                )
            self._changed.notify_all()
        return super().begin(result)

    def arrived(self, nbytes: int) -> None:
        with self._changed:
            self.nbytes = nbytes
            self._changed.notify_all()

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
