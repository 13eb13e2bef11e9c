"""Exchanges over gRPC: a channel to one server, and calls on it."""

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

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
from psproto.v1 import parameter_server_pb2 as ps
from psproto.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from psproto.v1.parameter_server_pb2_grpc import ParameterServerServiceStub
from psworker.transport.exchange_calls import (
    AnswerReceiver,
    Cancellation,
    ExchangeAnswer,
    TransferCalls,
    receive_answer,
)


class ServerChannel:
    """A channel and all its stubs.

    The stubs are created at once: creating a stub on a closed channel crashes gRPC's C core.

    Attributes:
        address: HOST:PORT of the server.
        is_closed: The channel is closed.
        exchanges: Stub of the Exchange call.
        shard: Stub of the parameter server service.
        coordinator: Stub of the coordinator service.
    """

    def __init__(self, address: str, tensors: bool) -> None:
        self.address = address
        self.is_closed = False
        self._channel = channel = open_channel(Endpoint(address), tensors)
        self.exchanges = ExchangeStub(channel)
        self.shard: ParameterServerServiceStub = ParameterServerServiceStub(channel)
        self.coordinator: CoordinatorServiceStub = CoordinatorServiceStub(channel)

    def close(self) -> None:
        """Close the channel, which ends all its calls. May be called again."""
        self.is_closed = True
        self._channel.close()

    def cancel(self, cause: object = None) -> None:
        """End a call that blocks the thread which made it; only closing the channel does.

        Calls of other threads on this channel are retried.
        """
        self.close()


class GrpcExchanges(TransferCalls):
    """Makes exchanges over gRPC."""

    def exchange(
        self,
        channel: ServerChannel,
        header: ps.PushPullHeader,
        send: Sequence[memoryview],
        receiver: AnswerReceiver,
        timeout: float,
        cancellation: Cancellation,
        frames: Iterator[Frame[ps.PushPullHeader]] | None,
    ) -> ExchangeAnswer:
        """Make an exchange over gRPC."""
        if header.memory:
            request = encode_header(header)
            return _exchange_once(channel, request, receiver, timeout, cancellation, True)
        if frames is None and _fits_once(header, send, receiver):
            request = encode_header(header, *(send if header.has_data else ()))
            return _exchange_once(channel, request, receiver, timeout, cancellation)
        messages: Iterator[bytes] | None = None
        if frames is not None:
            messages = map(_encode, frames)
        elif header.has_data:
            messages = itertools.chain([encode_header(header)], chunks(send))
        with self.open(channel.address, timeout, receiver) as call:
            stub = channel.exchanges
            return call.answer(
                stub.ask(encode_header(header))
                if messages is None
                else stub.stream(call.watch(messages)),
                cancellation,
            )


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
        call = once.future(request, timeout=timeout)
    cancellation.attach(call)
    try:
        answer = once(request, timeout=timeout) if call is channel else call.result()
    finally:
        cancellation.detach(call)
    result = receive_answer(iter([decode_response(answer)]), receiver, in_memory)
    return ExchangeAnswer(result, time.monotonic() - started, 0.0)
