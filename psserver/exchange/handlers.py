"""Answer the requests to every shard: exchanges over gRPC, and the other methods.

An exchange runs in the thread of its call, where its waits block.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from types import coroutine

import grpc

from pscommon.core.errors import InvalidRequestError
from pscommon.core.formats import spoken_format
from pscommon.core.partition import piece_nbytes
from pscommon.system.imports import installed
from pscommon.wire.frames import FRAME_BYTES, Filler, decode_request, encode_data, encode_header
from pscommon.wire.requests import (
    DESCRIBE,
    EXCHANGE,
    EXCHANGE_ONCE,
    INTRODUCE,
)
from psproto.v1 import parameter_server_pb2 as pb
from psserver.exchange.exchange import Exchange, Moved, Weights
from psserver.exchange.push_receiver import OpenPushReceiver
from psserver.parameters.weight_reads import WeightRead
from psserver.process.access import check_sender
from psserver.process.handlers import Handlers
from psserver.process.identity import ServerIdentity
from psserver.shard.engine import ShardEngine
from psserver.waiting import ThreadWaiter, run


def data_plane_handlers(engine: ShardEngine, identity: ServerIdentity) -> Handlers:
    """Return the handlers of one shard (proto/psproto/v1/parameter_server.proto)."""
    return {
        DESCRIBE: partial(_describe, engine, identity),
        INTRODUCE: partial(_introduce, identity),
        EXCHANGE: partial(_exchange, engine, identity),
        EXCHANGE_ONCE: partial(_exchange_once, engine, identity),
    }


def _describe(
    engine: ShardEngine, identity: ServerIdentity, request: pb.DescribeRequest
) -> pb.DescribeResponse:
    return pb.DescribeResponse(
        job=identity.job,
        shard=identity.shard,
        shards=identity.shards,
        addresses=identity.addresses,
        coordinator=identity.coordinator,
        version_text=installed("paramserver"),
        term=identity.term,
        layout=identity.reshard_count,
        format=spoken_format(),
        stream_address=identity.stream_address,
        stream_path=identity.stream_path,
        features=engine.traffic.features,
    )


def _introduce(identity: ServerIdentity, request: pb.IntroduceRequest) -> pb.IntroduceResponse:
    identity.introduce(request.coordinator, request.job)
    return pb.IntroduceResponse()


def _exchange(
    engine: ShardEngine,
    identity: ServerIdentity,
    frames: Iterator[bytes],
    context: grpc.ServicerContext | None,
) -> Iterator[bytes]:
    """Yield the frames of the answer. Without a context the caller is in this process."""
    io = StreamingIO(frames, context)
    if context is not None:
        check_sender(context, identity, io.header)
    exchange = Exchange(engine, identity, io.header).run(io)
    try:
        while True:
            yield exchange.send(None)
    except StopIteration:
        return
    finally:
        exchange.close()


def _exchange_once(
    engine: ShardEngine,
    identity: ServerIdentity,
    request: bytes,
    context: grpc.ServicerContext,
) -> bytes:
    io = UnaryIO(iter((request,)), context)
    check_sender(context, identity, io.header)
    run(Exchange(engine, identity, io.header).run(io))
    return io.answer


class FramesIO(ThreadWaiter):
    """Receives the frames of a request.

    Attributes:
        header: Header of the request.
    """

    def __init__(self, frames: Iterator[bytes], context: grpc.ServicerContext | None) -> None:
        super().__init__(context)
        first = next(frames, None)
        frame = decode_request(first) if first is not None else None
        if frame is None or frame.header is None:
            raise InvalidRequestError("an Exchange must start with its header")
        self.header = frame.header
        self._first, self._frames = frame._replace(header=None), map(decode_request, frames)
        self._has_begun = False

    async def receive(self, views: Sequence[memoryview], filled: Callable[[int], None]) -> None:
        filler = Filler(views)
        total = filler.missing
        filler.fill(self._first.data)
        filled(total - filler.missing)
        for frame in self._frames:
            if frame.header is not None:
                raise InvalidRequestError("a second header in one Exchange")
            filler.fill(frame.data)
            filled(total - filler.missing)
        if not filler.complete:
            raise InvalidRequestError(f"the push ended {filler.missing} bytes early")

    async def receive_piece(self, receiver: OpenPushReceiver) -> pb.PushPullHeader | None:
        frame = next(self._frames, None) if self._has_begun else self._first
        self._has_begun = True
        if frame is None:
            raise InvalidRequestError("the push ended without the header that closes it")
        Filler(receiver.views_at(frame.offset, frame.data.nbytes)).fill(frame.data)
        receiver.received(frame.offset, frame.data.nbytes)
        return frame.header

    async def discard(self) -> None:
        """Do nothing: the answer ends the call, and with it what the worker still sends."""


class StreamingIO(FramesIO):
    """Sends the answer as frames: each one suspends the exchange."""

    async def send(self, result: pb.ExchangeResult, weights: Weights, moved: Moved) -> None:
        await _emit(encode_header(result))
        if isinstance(weights, WeightRead):
            # the worker of an open push computes with the first bytes while the rest arrives
            size = piece_nbytes(weights.nbytes) if self.header.open else FRAME_BYTES
            for frame in weights.frames(size):
                await _emit(frame)
                moved()
        elif weights:
            await _emit(encode_data(memoryview(weights)))


@coroutine
def _emit(frame: bytes) -> Generator[bytes, None, None]:
    yield frame


class UnaryIO(FramesIO):
    """Keeps the answer, which is one frame.

    Attributes:
        answer: The frame.
    """

    answer = b""

    async def send(self, result: pb.ExchangeResult, weights: Weights, moved: Moved) -> None:
        if not isinstance(weights, WeightRead):
            self.answer = encode_header(result, memoryview(weights or b""))
            return

        def encode(views: Sequence[memoryview]) -> int:
            self.answer = encode_header(result, *views)
            return weights.nbytes

        self.answer = encode_header(result)
        if weights.nbytes:
            weights.take(weights.nbytes, encode)
