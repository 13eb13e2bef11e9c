"""Exchanges over gRPC: a channel to one server, and calls on it."""

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pscommon.core.errors import UnreachableError
from pscommon.security.credentials import process_credentials
from pscommon.security.tls import Tls
from pscommon.wire.endpoint import Endpoint, open_channel
from pscommon.wire.frames import (
    FRAME_BYTES,
    ExchangeStub,
    Frame,
    chunks,
    decode_response,
    encode_data,
    encode_header,
)
from pscommon.wire.requests import REQUESTS, Stub
from psproto.v1 import parameter_server_pb2 as ps
from psworker.transport.exchange_calls import (
    AnswerReceiver,
    Cancellation,
    ExchangeAnswer,
    receive_answer,
)

WORKER_ROWS = [row for row in REQUESTS if row.role in ("worker", "read") and not row.is_framed]


class ServerChannel:
    """A channel and all its stubs.

    The stubs are created at once: creating a stub on a closed channel crashes gRPC's C core.

    Attributes:
        address: HOST:PORT of the server.
        keys: The keys of this process's workers by number, which their exchanges carry.
        is_closed: The channel is closed.
        exchanges: Stub of the Exchange call.
        stubs: Those of all other requests of workers.
    """

    def __init__(self, address: str, tensors: bool, keys: Mapping[int, bytes]) -> None:
        self.address, self.keys = address, keys
        self.is_closed = False
        tls = process_credentials().tls
        self._generation = tls.generation if tls is not None else 0
        self._channel = channel = open_channel(Endpoint(address), tensors)
        self.exchanges = ExchangeStub(channel)
        self.stubs = {row: Stub(channel, row) for row in WORKER_ROWS}

    def close_if_outdated(self, tls: Tls) -> None:
        """Close the channel if its certificate was replaced: gRPC would connect with it again."""
        if tls.refreshed_generation() != self._generation:
            self.cancel()

    def cancel(self, cause: object = None) -> None:
        """Close the channel, which ends all its calls; those that are still needed are retried.

        Nothing else ends a call that blocks the thread which made it. May be called again.
        """
        self.is_closed = True
        self._channel.close()


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
        self._since = self._sent_at = time.monotonic()
        self._call: Any = None

    def send(self, frames: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the frames of the request, and record its end."""
        yield from self.watch(frames)
        self._sent_at = time.monotonic()

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
            frames = map(decode_response, self.watch(call))
            first = next(frames, None)
            answered = time.monotonic()
            result = receive_answer(
                itertools.chain([first] if first else [], frames), self._receiver
            )
            return ExchangeAnswer(result, self._sent_at, time.monotonic() - answered)
        finally:
            cancellation.detach(call)
            call.cancel()

    def end_if_stalled(self) -> None:
        if self._call is not None and time.monotonic() - self._since > self._seconds:
            self.is_stalled = True
            self._call.cancel()


def grpc_exchange(
    channel: ServerChannel,
    header: ps.PushPullHeader,
    send: Sequence[memoryview],
    receiver: AnswerReceiver,
    timeout: float,
    cancellation: Cancellation,
    frames: Iterator[Frame[ps.PushPullHeader]] | None,
    open_calls: set[TransferCall],
) -> ExchangeAnswer:
    """Make an exchange over gRPC; see `Transport.exchange`.

    open_calls: The streaming calls that are under way; this one is among them meanwhile.
    """
    key = channel.keys.get(header.worker, b"")
    if header.memory:
        request = encode_header(header)
        return _exchange_once(channel, request, key, receiver, timeout, cancellation, True)
    if frames is None and _fits_once(header, send, receiver):
        request = encode_header(header, *(send if header.has_data else ()))
        return _exchange_once(channel, request, key, receiver, timeout, cancellation)
    messages: Iterator[bytes] | None = None
    if frames is not None:
        messages = map(_encode, frames)
    elif header.has_data:
        messages = itertools.chain([encode_header(header)], chunks(send))
    call, stub = TransferCall(timeout, receiver), channel.exchanges
    open_calls.add(call)
    try:
        return call.answer(
            stub.ask(encode_header(header), key=key)
            if messages is None
            else stub.stream(call.send(messages), key=key),
            cancellation,
        )
    except Exception as error:
        if call.is_stalled:
            raise UnreachableError(
                f"no bytes have moved between this worker and {channel.address} for "
                f"{timeout:.0f} s",
                "UNREACHABLE",
            ) from error
        raise
    finally:
        open_calls.discard(call)


def _encode(frame: Frame[ps.PushPullHeader]) -> bytes:
    """Return a frame of an open push as a gRPC message."""
    if frame.header is not None:
        return encode_header(frame.header)
    return encode_data(frame.data, offset=frame.offset)


def _fits_once(
    header: ps.PushPullHeader, send: Sequence[memoryview], receiver: AnswerReceiver
) -> bool:
    """Return whether one message in each direction suffices."""
    answer = ps.ExchangeResult(pulled=header.pull != ps.PULL_NONE)
    return (
        sum(view.nbytes for view in send)
        <= FRAME_BYTES
        >= sum(view.nbytes for view in receiver.views(answer))
    )


def _exchange_once(
    channel: ServerChannel,
    request: bytes,
    key: bytes,
    receiver: AnswerReceiver,
    timeout: float,
    cancellation: Cancellation,
    in_memory: bool = False,
) -> ExchangeAnswer:
    """Exchange one message in each direction. in_memory: The bytes are in shared memory."""
    once: Any = channel.exchanges.once
    call: Any = channel
    started = time.monotonic()
    if not cancellation.is_alone:  # a blocking call spares one of gRPC's threads
        call = once.future(request, timeout=timeout, key=key)
    cancellation.attach(call)
    try:
        answer = once(request, timeout, key) if call is channel else call.result()
    finally:
        cancellation.detach(call)
    result = receive_answer(iter([decode_response(answer)]), receiver, in_memory)
    return ExchangeAnswer(result, started, 0.0)
