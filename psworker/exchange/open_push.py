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
from functools import partial

from pscommon.core.errors import InvalidRequestError, LayoutError, PSError
from pscommon.core.log_entries import BatchKey
from pscommon.core.partition import ByteRange
from pscommon.system import signals as interruptible
from pscommon.wire import messages as codec
from psproto.v1 import parameter_server_pb2 as ps
from psworker.core.results import PushResult
from psworker.exchange.all_shards import AllShards
from psworker.exchange.shard_exchange import (
    OpenShardExchange,
    SentBefore,
    ShardExchange,
    combined,
)
from psworker.exchange.shard_pieces import ShardDownload, ShardUpload
from psworker.exchange.transfer import ShardTransfer
from psworker.transport.exchange_calls import Cancellation

WAKE_UP_SECONDS = 0.2


class OpenPush:
    """The result of `ModelExchange.begin`; see `psworker.core.protocols.BegunPush`.

    Not thread-safe: one thread at a time may call it.

    Args:
        shards: The shards to which the push goes.
        transfer: The flat buffers.
        header: Header of the push without the fields that `finish` sets.
        release: The script has closed the push. May be called again.
    """

    def __init__(
        self,
        shards: AllShards,
        transfer: ShardTransfer,
        header: ps.PushPullHeader,
        release: Callable[["OpenPush"], None],
    ) -> None:
        self._lock = threading.RLock()
        # notified when bytes or an answer arrive, and when the thread ends
        self._changed = threading.Condition(self._lock)
        self._shards, self._transfer, self._header = shards, transfer, header
        self._plan = transfer.plan
        self._release = release
        self._downloads = [
            ShardDownload(self._changed, transfer, shard) for shard in range(transfer.plan.shards)
        ]
        assert isinstance(transfer.gradients, memoryview)
        self._uploads = [
            ShardUpload(transfer.plan, shard, transfer.gradients)
            for shard in range(transfer.plan.shards)
        ]
        self._exchanges: Sequence[ShardExchange] = ()  # by shard
        # the whole push went to another number of shards, and the weights came from there
        self._is_resent = False
        self._opened: list[OpenShardExchange] = []
        self._has_ended = False
        self._error: BaseException | None = None
        self._is_finished = False
        self._cancellation = Cancellation()
        self._thread = threading.Thread(target=self._run, name="psworker-flow", daemon=True)

    def start(self) -> None:
        """Start the push's thread, which sends what `send` queues."""
        self._shards.buffers.pin()
        with interruptible.deferred(lambda _: None):
            self._thread.start()

    def send(self, start: int, stop: int) -> None:
        for upload in self._uploads:
            upload.send(ByteRange(start, stop))

    def finish(
        self,
        *,
        absent: Collection[int] = (),
        samples: int = 1,
        batches: Sequence[BatchKey] = (),
        groups_json: str = "",
    ) -> PushResult:
        if self._is_finished or samples < 1:
            raise InvalidRequestError(
                "this push is finished" if self._is_finished else f"samples={samples} < 1"
            )
        transfer = ShardTransfer(self._plan, self._transfer.gradients, None, frozenset(absent))
        self._is_finished = True
        header = ps.PushPullHeader(
            samples=samples,
            batches=codec.batches_to_proto(batches),
            absent=sorted(absent),
            groups_json=groups_json,
        )
        connection = self._shards.connection
        connection.touch()
        self._shards.buffers.copy_in(transfer)
        with interruptible.deferred(lambda _: None):
            with self._changed:
                for exchange in () if self._has_ended else self._opened:
                    exchange.retry.begin_attempt()  # from here on the server has to answer
            for shard, upload in enumerate(self._uploads):
                upload.close(header, transfer.sent(shard), transfer.outgoing(shard))
        self._wait_until(lambda: self._is_decided)
        for exchange, download in zip(self._opened, self._downloads, strict=True):
            if download.result is not None and not self._is_resent:
                exchange.decide(download.result)
        result = combined(self._exchanges)
        connection.membership.pushes.close()
        connection.membership.require_version(result.version)
        self._shards.version = result.version  # its weights count as pulled
        return result

    def wait(self, start: int, stop: int) -> None:
        if not self._is_finished:
            raise InvalidRequestError(
                "the weights of a push arrive after finish(). Try: call finish() before wait()"
            )
        span, buffers = ByteRange(start, stop), self._shards.buffers
        copied = bool(buffers.shards) and self._transfer.weights is not buffers.weights
        self._wait_until(
            lambda: not copied and all(download.has_received(span) for download in self._downloads)
        )

    def close(self) -> None:
        self._is_finished = True
        with interruptible.deferred(lambda _: None):
            for upload in self._uploads:
                if not upload.closed.is_set():
                    upload.give_up()
        interruptible.join(self._thread)
        self._release(self)

    def abandon(self) -> None:
        """Cancel the calls and close: the client is being closed."""
        self._cancellation.cancel(InvalidRequestError("this Client is closed"))
        self.close()

    @property
    def _is_decided(self) -> bool:
        """True once all shards have answered with the outcome of the push."""
        return all(download.result is not None for download in self._downloads)

    def _wait_until(self, done: Callable[[], bool]) -> None:
        # Most waits end here. Ctrl-C cannot interrupt the acquisition of this lock, as it can
        # interrupt that of a condition.
        with self._lock:
            ends = self._has_ended or done()
        try:
            if not ends:
                with (
                    interruptible.deferred(lambda interrupt: self._cancellation.cancel(interrupt)),
                    self._changed,
                ):
                    while not self._has_ended and not done():
                        self._changed.wait(WAKE_UP_SECONDS)
        except BaseException as interrupt:
            # The second Ctrl-C: without this, `close` would wait for the calls.
            self._cancellation.cancel(interrupt)
            raise
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        """Run the exchanges of all shards, and keep the error; in the thread of the push."""
        try:
            try:
                transfer = self._exchange()
            except BaseException:
                if any(upload.header is not None for upload in self._uploads):
                    # The outcome is unknown. Without a digest no later push is taken for a repeat.
                    self._shards.connection.membership.pushes.fail(b"")
                raise
            self._shards.buffers.take_weights(transfer, self._exchanges)
        except BaseException as error:
            self._error = error
        with self._changed:
            self._has_ended = True
            for exchange in self._opened:
                exchange.retry.end_attempt()
            self._changed.notify_all()

    def _exchange(self) -> ShardTransfer:
        """Send the push while the script adds to it; return what was transferred."""
        connection, transfer = self._shards.connection, self._transfer
        try:
            connection.check()
            self._cancellation = Cancellation(is_alone=self._plan.shards == 1)
            headers = self._shards.buffers.headers(transfer, self._header, connection.membership)
            self._exchanges = self._opened = [
                OpenShardExchange(
                    connection.transport,
                    shard,
                    header,
                    upload,
                    partial(transfer.views, shard),
                    download,
                    part.nbytes,
                    connection.limits,
                    self._cancellation,
                )
                for shard, (header, upload, download, part) in enumerate(
                    zip(headers, self._uploads, self._downloads, transfer.parts, strict=True)
                )
            ]
            connection.executor.run(self._opened, self._cancellation)
        except BaseException as error:
            self._shards.buffers.reset()  # servers may still read or write it
            if not isinstance(error, LayoutError):
                raise
            return self._resend(error)
        return transfer

    def _resend(self, error: LayoutError) -> ShardTransfer:
        """Send the whole push to another number of shards, once the script has finished it."""
        for upload in self._uploads:
            upload.closed.wait()
        closing = self._uploads[0].header
        if closing is None:
            raise PSError("the push was given up")
        header = ps.PushPullHeader()
        header.CopyFrom(self._header)
        header.MergeFrom(closing)
        if not self._is_decided:  # `finish` blocks the script, so the buffers may be remapped
            self._shards.buffers.unpin()
        self._shards.relocate(error)
        transfer = replace(self._transfer, plan=self._shards.plan, absent=frozenset(closing.absent))
        transfer, self._exchanges = self._shards.run(
            transfer, header, SentBefore.CALL, self._set_cancellation
        )
        self._is_resent = True
        return transfer

    def _set_cancellation(self, cancellation: Cancellation) -> None:
        self._cancellation = cancellation


class BufferedPush:
    """A `BegunPush` that sends nothing before `finish`, which makes one blocking exchange.

    `ModelExchange.begin` uses it with a transport without threads, and while the outcome of the
    worker's last push is unknown.

    Attributes:
        finish: Pushes all gradients, pulls the weights, and returns the outcome of the push.
    """

    def __init__(self, finish: Callable[..., PushResult]) -> None:
        self.finish = finish

    def send(self, start: int, stop: int) -> None:
        """Do nothing: `finish` sends all bytes."""

    def wait(self, start: int, stop: int) -> None:
        """Return at once: all weights arrive in `finish`."""

    def close(self) -> None:
        """Do nothing: no call is open."""
