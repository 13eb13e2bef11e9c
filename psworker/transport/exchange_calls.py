"""Exchange calls: receivers of their bytes, their answers, and cancellation."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from pscommon.core.errors import PSError
from pscommon.wire.frames import Filler, Frame
from psproto.v1 import parameter_server_pb2 as ps

Views = Callable[[ps.ExchangeResult], Sequence[memoryview]]
"""Returns the memory for the bytes of an answer with this header."""


class AnswerReceiver:
    """Receives the bytes of an answer into memory views, one after another.

    Attributes:
        views: Returns the views for an answer's header.
        on_frame: Called for each frame that a streaming call sends or receives.
        begin: As `views`, called once the header has arrived; by default `views` itself.
        record_bytes: Called with the number of bytes of the answer that have arrived in total.
    """

    def __init__(
        self,
        views: Views,
        on_frame: Callable[[], None] = lambda: None,
        begin: Views | None = None,
        record_bytes: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        self.views, self.on_frame = views, on_frame
        self.begin, self.record_bytes = begin or views, record_bytes


class ExchangeAnswer(NamedTuple):
    """A server's answer to one Exchange.

    Attributes:
        result: Header of the answer.
        sent_at: When the last byte of the request was sent, in seconds of the monotonic clock.
        receive_seconds: Seconds from the header to the last byte.
    """

    result: ps.ExchangeResult
    sent_at: float
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
