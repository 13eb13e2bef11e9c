"""Translate the requests of workers into calls of the shard engine."""

from collections.abc import Callable, Iterator

import grpc

from pscommon.core.errors import InFlightError, InvalidRequestError
from pscommon.core.formats import spoken_format
from pscommon.core.log_entries import PushKey
from pscommon.core.partition import piece_nbytes
from pscommon.system.packages import installed
from pscommon.wire.frames import Frame, decode_request, encode_header
from pscommon.wire.status import answering
from psproto.v1 import parameter_server_pb2 as pb
from psserver.process.identity import ServerIdentity
from psserver.shard.engine import ShardEngine
from psserver.transfer.exchange_steps import ExchangeSteps
from psserver.transfer.push_receiver import receive, receive_open

IsConnected = Callable[[], bool]


class DataPlaneServicer:
    """The data plane of one shard (proto/psproto/v1/parameter_server.proto)."""

    def __init__(self, engine: ShardEngine, identity: ServerIdentity) -> None:
        self._engine = engine
        self._identity = identity
        self._steps = ExchangeSteps(engine, identity)

    def Describe(
        self, request: pb.DescribeRequest, context: grpc.ServicerContext
    ) -> pb.DescribeResponse:
        identity = self._identity
        return pb.DescribeResponse(
            job=identity.job,
            shard=identity.shard,
            shards=identity.shards,
            addresses=identity.addresses,
            coordinator=identity.coordinator,
            version_text=installed("paramserver"),
            term=identity.term,
            layout=identity.layout,
            format=spoken_format(),
            stream_address=identity.stream_address,
            stream_path=identity.stream_path,
            features=self._engine.traffic.features,
        )

    def Introduce(
        self, request: pb.IntroduceRequest, context: grpc.ServicerContext
    ) -> pb.IntroduceResponse:
        with answering(context):
            self._identity.introduce(request.coordinator, request.job)
        return pb.IntroduceResponse()

    def Exchange(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        with answering(context):
            yield from self.exchange(frames, context.is_active)

    def exchange(self, frames: Iterator[bytes], is_connected: IsConnected) -> Iterator[bytes]:
        """Yield the frames of the answer to a caller, as long as it is connected."""
        first = next(frames, None)
        if first is None:
            raise InvalidRequestError("an Exchange must start with its header")
        header, result = self._push_and_wait(first, frames, is_connected)
        if not result.pulled or header.memory:
            yield encode_header(result)
            return
        try:
            with self._steps.pulls.open(header, result, is_connected) as read:
                yield encode_header(result)
                # the worker of an open push computes with the first bytes while the rest arrives
                data = read.frames(piece_nbytes(read.nbytes)) if header.open else read.frames()
                yield from self._engine.traffic.transfer.watch_frames(header.worker, data)
        except InFlightError as full:
            yield encode_header(self._steps.make_pending(str(full)))

    def ExchangeOnce(self, request: bytes, context: grpc.ServicerContext | None) -> bytes:
        with answering(context):
            is_connected = context.is_active if context is not None else _always_connected
            header, result = self._push_and_wait(request, iter(()), is_connected)
            if not result.pulled or header.memory:
                return encode_header(result)
            return encode_header(result, memoryview(self._steps.pulls.read_all(header, result)))

    def AttachMemory(
        self, request: pb.AttachMemoryRequest, context: grpc.ServicerContext
    ) -> pb.AttachMemoryResponse:
        with answering(context):
            self._identity.check_job(request.job)
            reason = self._engine.traffic.shared_buffers.attach(request)
        return pb.AttachMemoryResponse(attached=not reason, reason=reason)

    def _push_and_wait(
        self, first: bytes, frames: Iterator[bytes], is_connected: IsConnected
    ) -> tuple[pb.PushPullHeader, pb.ExchangeResult]:
        """Receive the push and wait until it is decided. Return the header and the result."""
        first_frame = decode_request(first)
        header = first_frame.header
        if header is None:
            raise InvalidRequestError("an Exchange must start with its header")
        key, seconds = self._steps.begin(header)
        is_duplicate = (
            key is not None
            and header.has_data
            and self._receive_push(key, header, first_frame, frames, is_connected)
        )
        outcome = self._engine.wait_for_outcome(key, header.min_version, seconds, is_connected)
        return header, self._steps.make_result(header, key, outcome, is_duplicate)

    def _receive_push(
        self,
        key: PushKey,
        header: pb.PushPullHeader,
        first: Frame[pb.PushPullHeader],
        frames: Iterator[bytes],
        is_connected: IsConnected,
    ) -> bool:
        """Receive and stage a push. Return whether it was decided before."""
        staging = self._steps.allocator.take(header, is_connected)
        frames = self._engine.traffic.transfer.watch_frames(header.worker, frames)
        try:
            if header.open:
                header.MergeFrom(receive_open(staging, first, frames))
            elif not header.memory:
                receive(staging, first.data, frames)
            self._steps.check_push(header, staging)
        except BaseException:
            self._engine.release(staging)
            raise
        return self._steps.stage(key, header, staging)


def _always_connected() -> bool:
    return True
