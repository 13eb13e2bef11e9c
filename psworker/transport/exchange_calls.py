"""Exchange calls: receivers of their bytes, cancellation, and detection of stalled transfers."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from pscommon.core.errors import PSError, UnreachableError
from pscommon.wire.frames import Filler, Frame, decode_response
from psproto.v1 import parameter_server_pb2 as ps


class AnswerReceiver:
    """Receives the bytes of an answer into memory views, one after another.

    Attributes:
        views: Returns the views for an answer's header.
        on_frame: Called for each frame that a streaming call sends or receives.
    """

    def __init__(self, views: Callable[[ps.ExchangeResult], Sequence[memoryview]]) -> None:
        self.views = views
        self.on_frame: Callable[[], None] = lambda: None

    def begin(self, result: ps.ExchangeResult) -> Sequence[memoryview]:
        """Return the views for the bytes of an answer whose header has arrived."""
        return self.views(result)

    def record_bytes(self, nbytes: int) -> None:
        """Record that `nbytes` bytes of the answer have arrived in total."""


class ExchangeAnswer(NamedTuple):
    """A server's answer to one Exchange.

    Attributes:
        result: Header of the answer.
        header_seconds: Seconds from the request to the header.
        receive_seconds: Seconds from the header to the last byte.
    """

    result: ps.ExchangeResult
    header_seconds: float
    receive_seconds: float


class Cancellation:
    """Ends a request's calls on all shards, and prevents new ones.

    Attributes:
        is_alone: The request has one part, so a failure of another part cannot end it.
        cause: The first error that cancelled the request; None before.
    """

    def __init__(self, is_alone: bool = False) -> None:
        self.is_alone = is_alone
        self._lock = threading.Lock()
        self._calls: set[Any] = set()
        self.cause: BaseException | None = None

    def cancel(self, cause: BaseException) -> None:
        """Cancel all calls of the request. Only the first cause is kept."""
        with self._lock:
            self.cause = self.cause or cause
            calls = list(self._calls)
        for call in calls:
            call.cancel()

    def attach(self, call: Any) -> None:
        """Add a call in flight; cancel it at once if the request is cancelled."""
        with self._lock:
            self._calls.add(call)
            cancelled = self.cause is not None
        if cancelled:
            call.cancel()

    def detach(self, call: Any) -> None:
        with self._lock:
            self._calls.discard(call)

    def check(self) -> None:
        """Raise PSError if the request is cancelled."""
        if self.cause is not None:
            raise PSError(f"the call was cancelled because another shard failed: {self.cause}")


class TransferCall:
    """A streaming call without a deadline: only a stall ends it.

    Args:
        seconds: Longest time without a frame before the call counts as stalled.
        receiver: Memory for the bytes of the answer.

    Attributes:
        is_stalled: The call was ended because no frame moved.
    """

    def __init__(self, seconds: float, receiver: AnswerReceiver) -> None:
        self.is_stalled = False
        self._seconds, self._receiver = seconds, receiver
        self._since = time.monotonic()
        self._call: Any = None

    def watch(self, frames: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the frames, and record the progress after each one."""
        for frame in frames:
            yield frame
            self._since = time.monotonic()
            self._receiver.on_frame()

    def answer(self, call: Any, cancellation: Cancellation) -> ExchangeAnswer:
        """Return the answer of the call; its bytes go to the receiver."""
        self._call = call
        cancellation.attach(call)
        try:
            started = time.monotonic()
            frames = map(decode_response, self.watch(call))
            first = next(frames, None)
            answered = time.monotonic()
            result = receive_answer(
                itertools.chain([first] if first else [], frames), self._receiver
            )
            return ExchangeAnswer(result, answered - started, time.monotonic() - answered)
        finally:
            cancellation.detach(call)
            call.cancel()

    def end_if_stalled(self) -> None:
        if self._call is not None and time.monotonic() - self._since > self._seconds:
            self.is_stalled = True
            self._call.cancel()


class TransferCalls:
    """The streaming calls of one transport that are under way."""

    def __init__(self) -> None:
        self._open: set[TransferCall] = set()

    @contextmanager
    def open(
        self, address: str, seconds: float, receiver: AnswerReceiver
    ) -> Iterator[TransferCall]:
        """Track a call during the `with` block. Raises UnreachableError if it stalled."""
        stream = TransferCall(seconds, receiver)
        self._open.add(stream)
        try:
            yield stream
        except Exception as error:
            if stream.is_stalled:
                text = f"no bytes have moved between this worker and {address} for {seconds:.0f} s"
                raise UnreachableError(text, "UNREACHABLE") from error
            raise
        finally:
            self._open.discard(stream)

    def end_stalled(self) -> None:
        """End stalled calls. Call it periodically, from a thread that waits for no call."""
        for stream in list(self._open):
            stream.end_if_stalled()


def receive_answer(
    frames: Iterator[Frame[ps.ExchangeResult]], receiver: AnswerReceiver, in_memory: bool = False
) -> ps.ExchangeResult:
    """Return the answer's header, and give its bytes to the receiver.

    Reads to the end of the call, which raises the call's error status.

    in_memory: The server has written the bytes to shared memory; no frame contains them.
    """
    first = next(frames, None)
    if first is None:
        raise PSError("the server ended the call without an answer")
    result, data = first.header, first.data
    if result is None:
        raise PSError("the server sent data before a header")
    views = receiver.begin(result)
    filler = Filler(views if result.nbytes and not in_memory else ())
    filler.fill(data)
    receiver.record_bytes(result.nbytes if in_memory else data.nbytes)
    for frame in frames:
        if frame.header is not None:
            raise PSError("the server sent a second header")
        filler.fill(frame.data)
        receiver.record_bytes(result.nbytes - filler.missing)
    if not filler.complete:
        raise PSError(f"the server sent {filler.missing} bytes too few")
    return result
