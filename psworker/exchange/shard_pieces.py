"""One shard's bytes of a push in pieces: the upload of gradients, the download of weights."""

import queue
import threading
from collections.abc import Iterator, Sequence

from pscommon.core.partition import ByteRange, PartitionPlan
from pscommon.wire.frames import FRAME_BYTES, NOTHING, Frame
from psproto.v1 import parameter_server_pb2 as ps
from psworker.exchange.transfer import STATUS, ShardTransfer


class ShardUpload:
    """One shard's bytes of a push that is not complete yet.

    Attributes:
        closed: Set once the push is complete or given up.
        header: The closing header; None while the push is open, and if it is given up.
        views: All bytes of the complete push for this shard.
    """

    def __init__(self, plan: PartitionPlan, shard: int, gradients: memoryview) -> None:
        self._ranges = plan.range(shard, "trainable"), plan.range(shard, "buffer")
        self._gradients = gradients
        self._queue: queue.SimpleQueue[ByteRange | ps.PushPullHeader | None] = queue.SimpleQueue()
        self._sent: list[ByteRange] = []
        self.closed = threading.Event()
        self.header: ps.PushPullHeader | None = None
        self.views: Sequence[memoryview] = ()

    def send(self, span: ByteRange) -> None:
        """Queue the part of a byte range that this shard holds."""
        for own in self._ranges:
            start, stop = max(span.start, own.start), min(span.stop, own.stop)
            if start < stop:
                self._sent.append(ByteRange(start, stop))
                self._queue.put(ByteRange(start, stop))

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
        self._queue.put(header)
        self.closed.set()

    def give_up(self) -> None:
        """End the upload without a push. May be called again, and after `close`."""
        self._queue.put(None)
        self.closed.set()

    def frames(self, header: ps.PushPullHeader) -> Iterator[Frame[ps.PushPullHeader]]:
        """Yield the frames of the call, until the push is closed or given up."""
        yield Frame(header, NOTHING)
        while (item := self._queue.get()) is not None:
            if isinstance(item, ps.PushPullHeader):
                yield Frame(item, NOTHING)
                return
            for start in range(item.start, item.stop, FRAME_BYTES):
                stop = min(start + FRAME_BYTES, item.stop)
                yield Frame(None, self._gradients[start:stop], self._offset(start))

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


class ShardDownload:
    """The answer of one shard to an open push, while it arrives.

    Attributes:
        result: The answer's header once it holds an outcome; None before.
        nbytes: Number of bytes that have arrived.
        order: The ranges of the flat buffer that arrive, in the order of arrival.
    """

    def __init__(self, changed: threading.Condition, transfer: ShardTransfer, shard: int) -> None:
        """changed: Notified at each change; its lock guards all attributes."""
        self._changed = changed
        self._transfer, self._shard = transfer, shard
        self.result: ps.ExchangeResult | None = None
        self.nbytes = 0
        self.order: Sequence[ByteRange] = ()

    def begin(self, result: ps.ExchangeResult) -> Sequence[memoryview]:
        """Record the answer's header; return the memory for its bytes."""
        with self._changed:
            if STATUS.get(result.outcome):
                self.result, self.nbytes = result, 0
                self.order = (
                    self._transfer.incoming(self._shard, result.unchanged) if result.nbytes else ()
                )
            self._changed.notify_all()
        return self._transfer.views(self._shard, result)

    def record_bytes(self, nbytes: int) -> None:
        with self._changed:
            self.nbytes = nbytes
            self._changed.notify_all()

    def has_received(self, span: ByteRange) -> bool:
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
