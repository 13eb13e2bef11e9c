"""Calls of Exchange: where their bytes go, what ends them, and whether they move."""

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
    """Where the bytes that come with an answer go: into the views, by its header, one after
    another.

    moved: called for each frame, sent or received, of a call that has many.
    """

    def __init__(self, views: Callable[[ps.ExchangeResult], Sequence[memoryview]]) -> None:
        self.views = views
        self.moved: Callable[[], None] = lambda: None

    def begin(self, result: ps.ExchangeResult) -> Sequence[memoryview]:
        """The header is here."""
        return self.views(result)

    def arrived(self, nbytes: int) -> None:
        """So many of its bytes are."""


class ExchangeAnswer(NamedTuple):
    """A server's answer to one Exchange; seconds until its header came, and from then until the
    last byte.
    """

    result: ps.ExchangeResult
    header_seconds: float
    receive_seconds: float


class Cancellation:
    """Ends the calls of one request that are in flight, on all shards, and keeps new ones from
    starting.

    alone: the request has one part, so no other's failure can end it.
    """

    def __init__(self, alone: bool = False) -> None:
        self.alone = alone
        self._lock = threading.Lock()
        self._calls: set[Any] = set()
        self.cause: BaseException | None = None

    def cancel(self, cause: BaseException) -> None:
        """The first cause is the one that counts."""
        with self._lock:
            self.cause = self.cause or cause
            calls = list(self._calls)
        for call in calls:
            call.cancel()

    def attach(self, call: Any) -> None:
        with self._lock:
            self._calls.add(call)
            cancelled = self.cause is not None
        if cancelled:
            call.cancel()

    def detach(self, call: Any) -> None:
        with self._lock:
            self._calls.discard(call)

    def check(self) -> None:
        """Raises if the request was given up."""
        if self.cause is not None:
            raise PSError(f"given up, because another shard failed: {self.cause}")


class TransferCall:
    """A call of many frames. It may take as long as they move, however slow the line is.

    seconds: without any that moves, after which it is given up.
    """

    def __init__(self, seconds: float, receiver: AnswerReceiver) -> None:
        self.stalled = False
        self._seconds, self._receiver = seconds, receiver
        self._since = time.monotonic()
        self._call: Any = None

    def watched(self, frames: Iterator[bytes]) -> Iterator[bytes]:
        """The same frames, each seen once it has been taken."""
        for frame in frames:
            yield frame
            self._since = time.monotonic()
            self._receiver.moved()

    def answer(self, call: Any, cancellation: Cancellation) -> ExchangeAnswer:
        """What comes back; the receiver gets the bytes."""
        self._call = call
        cancellation.attach(call)
        try:
            started = time.monotonic()
            frames = map(decode_response, self.watched(call))
            first = next(frames, None)
            answered = time.monotonic()
            result = take(itertools.chain([first] if first else [], frames), self._receiver)
            return ExchangeAnswer(result, answered - started, time.monotonic() - answered)
        finally:
            cancellation.detach(call)
            call.cancel()

    def end_if_stalled(self) -> None:
        if self._call is not None and time.monotonic() - self._since > self._seconds:
            self.stalled = True
            self._call.cancel()


class TransferCalls:
    """Those of one lane that are under way."""

    def __init__(self) -> None:
        self._open: set[TransferCall] = set()

    @contextmanager
    def open(
        self, address: str, seconds: float, receiver: AnswerReceiver
    ) -> Iterator[TransferCall]:
        """One more, while the `with` lasts. UnreachableError once it has stalled."""
        stream = TransferCall(seconds, receiver)
        self._open.add(stream)
        try:
            yield stream
        except Exception as error:
            if stream.stalled:
                text = f"between here and {address} nothing has moved for {seconds:.0f} s"
                raise UnreachableError(text, "UNREACHABLE") from error
            raise
        finally:
            self._open.discard(stream)

    def end_stalled(self) -> None:
        """To be called now and then, by a thread that waits for none of them."""
        for stream in list(self._open):
            stream.end_if_stalled()


def take(
    frames: Iterator[Frame[ps.ExchangeResult]], receiver: AnswerReceiver, in_memory: bool = False
) -> ps.ExchangeResult:
    """The answer's header; the receiver gets its bytes, unless they are in memory. Reads to the
    end, which brings the call's status."""
    first = next(frames, None)
    if first is None:
        raise PSError("the server ended the call without an answer")
    result, data = first.header, first.data
    if result is None:
        raise PSError("the server sent data before a header")
    views = receiver.begin(result)
    filler = Filler(views if result.nbytes and not in_memory else ())
    filler.fill(data)
    receiver.arrived(result.nbytes if in_memory else data.nbytes)
    for frame in frames:
        if frame.header is not None:
            raise PSError("the server sent a second header")
        filler.fill(frame.data)
        receiver.arrived(result.nbytes - filler.missing)
    if not filler.complete:
        raise PSError(f"the server sent {filler.missing} bytes too few")
    return result
