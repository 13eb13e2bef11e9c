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
from psworker.exchange.shard_exchange import OpenShardExchange, ShardExchange, combined
from psworker.exchange.shard_streams import ShardDownload, ShardUpload
from psworker.exchange.shared_buffers import ClientBuffers
from psworker.exchange.transfer import ShardTransfer
from psworker.transport.exchange_calls import Cancellation
from psworker.transport.interface import Transport

WAKE_UP_SECONDS = 0.2


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
        exchanges: The exchange of each shard, by shard.
        is_resent: The whole push went to another number of shards, and the weights came from there.
    """

    def __init__(
        self,
        steps: PushSteps,
        buffers: ClientBuffers,
        transfer: ShardTransfer,
        header: ps.PushPullHeader,
    ) -> None:
        self._lock = threading.RLock()
        self.changed = threading.Condition(self._lock)
        self.header = header
        self._steps, self._buffers, self._transfer = steps, buffers, transfer
        self._plan = transfer.plan
        self._downloads = [
            ShardDownload(self.changed, transfer, shard) for shard in range(transfer.plan.shards)
        ]
        assert isinstance(transfer.gradients, memoryview)
        self._uploads = [
            ShardUpload(transfer.plan, shard, transfer.gradients)
            for shard in range(transfer.plan.shards)
        ]
        self.exchanges: Sequence[ShardExchange] = ()
        self.is_resent = False
        self._opened: list[OpenShardExchange] = []
        self._has_ended = False
        self._error: BaseException | None = None
        self._is_finished = False
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
        """Send the rest and return the outcome of the push; its weights may still be arriving."""
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
        self._steps.begin_finish()
        self._buffers.copy_in(transfer)
        with interruptible.deferred(lambda _: None):
            with self.changed:
                for exchange in () if self._has_ended else self._opened:
                    exchange.retry.begin_attempt()  # from here on the server has to answer
            for shard, upload in enumerate(self._uploads):
                upload.close(header, transfer.sent(shard), transfer.outgoing(shard))
        self._wait_until(lambda: self.is_decided)
        for exchange, download in zip(self._opened, self._downloads, strict=True):
            if download.result is not None and not self.is_resent:
                exchange.decide(download.result)
        result = combined(self.exchanges)
        self._steps.record_decision(result)
        return result

    def wait(self, start: int, stop: int) -> None:
        """Wait for bytes [start, stop) of the weights buffer; raise what an exchange raises."""
        if not self._is_finished:
            raise InvalidRequestError(
                "the weights of a push arrive after finish(). Try: call finish() before wait()"
            )
        span, buffers = ByteRange(start, stop), self._buffers
        copied = bool(buffers.shards) and self._transfer.weights is not buffers.weights
        self._wait_until(
            lambda: not copied and all(download.has_received(span) for download in self._downloads)
        )

    def close(self) -> None:
        """Wait until all weights have arrived; give up a push that is not finished or has failed.

        May be called again.
        """
        self._is_finished = True
        with interruptible.deferred(lambda _: None):
            for upload in self._uploads:
                if not upload.closed.is_set():
                    upload.give_up()
        interruptible.join(self._thread)
        self._steps.release(self)

    def abandon(self) -> None:
        """Cancel the calls and close: the client is being closed."""
        self._cancellation.cancel(InvalidRequestError("this Client is closed"))
        self.close()

    def open_exchanges(
        self,
        transport: Transport,
        headers: Sequence[ps.PushPullHeader],
        limits: TimeLimits,
        cancellation: Cancellation,
    ) -> Sequence[OpenShardExchange]:
        """Return one exchange per shard, to be run at the same time. headers: By shard."""
        self._cancellation = cancellation
        self.exchanges = self._opened = [
            OpenShardExchange(
                transport, shard, header, upload, download, part.nbytes, limits, cancellation
            )
            for shard, (header, upload, download, part) in enumerate(
                zip(headers, self._uploads, self._downloads, self._transfer.parts, strict=True)
            )
        ]
        return self._opened

    def set_cancellation(self, cancellation: Cancellation) -> None:
        """Set the Cancellation that ends the calls of this push."""
        self._cancellation = cancellation

    def wait_for_end(self) -> tuple[ShardTransfer, ps.PushPullHeader]:
        """Wait until the script has finished the push, and return all of it.

        Raises PSError if the script gives it up.
        """
        for upload in self._uploads:
            upload.closed.wait()
        closing = self._uploads[0].header
        if closing is None:
            raise PSError("the push was given up")
        header = ps.PushPullHeader()
        header.CopyFrom(self.header)
        header.MergeFrom(closing)
        return replace(self._transfer, absent=frozenset(closing.absent)), header

    @property
    def is_decided(self) -> bool:
        """True once all shards have answered with the outcome of the push."""
        return all(download.result is not None for download in self._downloads)

    @property
    def may_count(self) -> bool:
        """True if a server may have received the whole push."""
        return any(upload.header is not None for upload in self._uploads)

    def _wait_until(self, done: Callable[[], bool]) -> None:
        # Most waits end here. Ctrl-C cannot interrupt the acquisition of this lock, as it can
        # interrupt that of a condition.
        with self._lock:
            ends = self._has_ended or done()
        try:
            if not ends:
                with (
                    interruptible.deferred(lambda interrupt: self._cancellation.cancel(interrupt)),
                    self.changed,
                ):
                    while not self._has_ended and not done():
                        self.changed.wait(WAKE_UP_SECONDS)
        except BaseException as interrupt:
            # The second Ctrl-C: without this, `close` would wait for the calls.
            self._cancellation.cancel(interrupt)
            raise
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._steps.run(self, self._transfer)
        except BaseException as error:
            self._error = error
        with self.changed:
            self._has_ended = True
            for exchange in self._opened:
                exchange.retry.end_attempt()
            self.changed.notify_all()


class BufferedPush:
    """A `PushStream` that sends nothing before `finish`, which makes one blocking exchange.

    `ModelExchange.begin` uses it with a transport without threads, and while the outcome of the
    worker's last push is unknown.

    exchange: Has the signature of `Client.exchange`.
    """

    def __init__(
        self, exchange: Callable[..., PushResult], gradients: memoryview, weights: memoryview
    ) -> None:
        self._exchange = exchange
        self._gradients, self._weights = gradients, weights

    def send(self, start: int, stop: int) -> None:
        """Do nothing: `finish` sends all bytes."""

    def finish(
        self,
        *,
        absent: Collection[int] = (),
        samples: int = 1,
        batches: Sequence[BatchKey] = (),
        groups_json: str = "",
    ) -> PushResult:
        """Push all gradients, pull the weights, and return the outcome of the push."""
        return self._exchange(
            gradients=self._gradients,
            weights=self._weights,
            absent=absent,
            samples=samples,
            batches=batches,
            groups_json=groups_json,
            base=None,
        )

    def wait(self, start: int, stop: int) -> None:
        """Return at once: all weights arrive in `finish`."""

    def close(self) -> None:
        """Do nothing: no call is open."""
