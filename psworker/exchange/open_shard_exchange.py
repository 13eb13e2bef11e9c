"""One shard's part of an open push: the upload of gradients and the download of weights."""

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
"""Deadline in seconds of a call that is open while the script computes.

Pings detect a lost server.
"""


class ShardUpload:
    """One shard's bytes of a push that is not complete yet.

    Attributes:
        closed: Set once the push is complete or given up.
        header: The closing header; None while the push is open, and if it is given up.
        views: All bytes of the complete push for this shard.
    """

    def __init__(self, plan: PartitionPlan, shard: int, gradients: memoryview) -> None:
        self._ranges = plan.range(shard, "trainable"), plan.range(shard, "buffer")
        self._tape = gradients
        self._orders: queue.SimpleQueue[ByteRange | ps.PushPullHeader | None] = queue.SimpleQueue()
        self._sent: list[ByteRange] = []
        self.closed = threading.Event()
        self.header: ps.PushPullHeader | None = None
        self.views: Sequence[memoryview] = ()

    def send(self, span: ByteRange) -> None:
        """Queue the part of a byte range that this shard holds."""
        for held in self._ranges:
            start, stop = max(span.start, held.start), min(span.stop, held.stop)
            if start < stop:
                self._sent.append(ByteRange(start, stop))
                self._orders.put(ByteRange(start, stop))

    def close(
        self, header: ps.PushPullHeader, views: Sequence[memoryview], needed: Sequence[ByteRange]
    ) -> None:
        """Queue the needed bytes that were not sent, then the closing header.

        header: Fields of the complete push.
        views: All bytes of the push for this shard, in wire order.
        needed: Byte ranges of the flat buffer that the shard must receive.
        """
        for span in needed:
            for missing in _without(span, self._sent):
                self.send(missing)
        self.header, self.views = header, views
        self._orders.put(header)
        self.closed.set()

    def give_up(self) -> None:
        """End the upload without a push. May be called again, and after `close`."""
        self._orders.put(None)
        self.closed.set()

    def frames(self, header: ps.PushPullHeader) -> Iterator[bytes]:
        """Yield the encoded frames of the call, until the push is closed or given up."""
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
    """Yield the parts of `span` that no range of `sent` covers."""
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
    """A shard's exchange whose first attempt begins before the push is complete.

    Attributes:
        opening: The bytes of the push for this shard.
    """

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
        self._retry.end_attempt()  # the call waits for the script: see `expected`
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
            self._retry.restart()  # the time in which the script computed is not silence

    def expected(self) -> None:
        """Record that the push is being closed: from here on the server has to answer."""
        self._retry.begin_attempt()

    def over(self) -> None:
        """Record that no answer is expected any more."""
        self._retry.end_attempt()

    def _wait_for_close(self) -> None:
        """Wait until the push is complete, and use its bytes and header for the next attempt."""
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
    """The answer of one shard to an open push, while it arrives.

    Attributes:
        result: The answer's header once it holds an outcome; None before.
        nbytes: Number of bytes that have arrived.
        order: The ranges of the flat buffer that arrive, in the order of arrival.
    """

    def __init__(self, changed: threading.Condition, move: ShardTransfer, shard: int) -> None:
        """changed: Notified at each change; its lock guards all attributes."""
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
        """Return whether all bytes of `span` that the shard sends have arrived."""
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
