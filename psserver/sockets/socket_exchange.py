"""The bytes of one exchange over a stream. GO asks for a push that is too large to send unasked.
Shared memory that a worker offers for its exchanges.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial

from pscommon.core.errors import InvalidRequestError, out_of_the_job
from pscommon.core.log_entries import PushKey
from pscommon.wire.status import error_for_peer
from pscommon.wire.stream_format import EAGER_BYTES, FrameKind, decode_message
from psproto.v1 import parameter_server_pb2 as pb
from psserver.exchange.exchange import Exchange, Moved, Weights
from psserver.exchange.push_receiver import OpenPushReceiver
from psserver.parameters.weight_reads import WeightRead
from psserver.shard.engine import ShardEngine
from psserver.shard.worker_traffic import WorkerBuffers
from psserver.sockets.event_loop import SocketService, SocketWaiter
from psserver.sockets.frame_socket import ConnectionLostError, FrameSocket
from psserver.waiting import until


class SocketIO(SocketWaiter):
    """Moves the bytes of one exchange (implements ExchangeIO).

    data_nbytes: Bytes of data that the worker has announced.
    """

    def __init__(self, service: SocketService, socket: FrameSocket, data_nbytes: int) -> None:
        super().__init__(service)
        self._socket, self._data_nbytes = socket, data_nbytes
        # what the worker sends without waiting for GO, and is not read yet
        self._unread_nbytes = data_nbytes if data_nbytes <= EAGER_BYTES else 0
        self._has_asked = False

    async def receive(self, views: Sequence[memoryview], filled: Callable[[int], None]) -> None:
        nbytes = sum(map(len, views))
        if self._data_nbytes != nbytes:
            raise InvalidRequestError(
                f"the push has {self._data_nbytes} bytes, but its tensors {nbytes}"
            )
        if nbytes > EAGER_BYTES:
            await self._socket.send_frame(FrameKind.GO)
        await self._socket.receive(views, filled)
        self._unread_nbytes = 0

    async def receive_piece(self, receiver: OpenPushReceiver) -> pb.PushPullHeader | None:
        if not self._has_asked:
            await self._socket.send_frame(FrameKind.GO)
            self._has_asked = True
        prefix, message = await self._socket.receive_frame()
        if prefix.kind is FrameKind.CLOSE:
            return decode_message(pb.PushPullHeader, message)
        if prefix.kind is not FrameKind.DATA:
            raise InvalidRequestError(f"a frame of kind {prefix.kind.name} in an open push")
        self._unread_nbytes = prefix.data_nbytes
        await self._socket.receive(receiver.views_at(prefix.offset, prefix.data_nbytes))
        self._unread_nbytes = 0
        receiver.received(prefix.offset, prefix.data_nbytes)
        return None

    async def discard(self) -> None:
        nbytes, self._unread_nbytes = self._unread_nbytes, 0
        await self._socket.discard(nbytes)

    async def send(self, result: pb.ExchangeResult, weights: Weights, moved: Moved) -> None:
        message = result.SerializeToString()
        if isinstance(weights, WeightRead):
            await self._socket.send_prefix(FrameKind.RESULT, message, weights.nbytes)
            await self._socket.send_from(weights, moved)
        else:
            await self._socket.send_frame(FrameKind.RESULT, message, weights or b"")


async def serve_exchange(
    service: SocketService,
    socket: FrameSocket,
    message: bytes,
    data_nbytes: int,
    check_sender: Callable[[int], None],
) -> None:
    """Carry out an exchange and answer it; errors are answered too.

    message: The header, encoded.
    check_sender: Raises an error where its worker may not use this connection.

    Raises ConnectionLostError or OSError if the connection is lost.
    """
    io = SocketIO(service, socket, data_nbytes)
    try:
        with service.timing("Exchange"):
            header = decode_message(pb.PushPullHeader, message)
            check_sender(header.worker)
            await Exchange(service.engine, service.identity, header).run(io)
    except (ConnectionLostError, OSError):
        raise
    except Exception as failure:
        await io.discard()
        await socket.send_error(error_for_peer(failure))


async def serve_offer(
    service: SocketService,
    socket: FrameSocket,
    message: bytes,
    check_sender: Callable[[int], None],
) -> None:
    """Attach the memory that a worker offers, and answer; errors are answered too.

    The arguments and errors are those of `serve_exchange`.
    """
    engine, waiter = service.engine, SocketWaiter(service)
    descriptor, failure = await socket.receive_descriptor(), None
    try:
        header = decode_message(pb.PushPullHeader, message)
        check_sender(header.worker)
        service.identity.check_job(header.job)
        service.identity.check_term(header.term)
        if descriptor is None:
            raise InvalidRequestError("the offered memory is refused: not one descriptor came")
        live, seconds = engine.live, header.wait_ms / 1000
        await until(
            lambda: live.store or live.stop_reason or None,
            partial(live.changes.watch, None),
            seconds,
            waiter,
        )
        await waiter.do(partial(_attach, engine, header, descriptor))
    except (ConnectionLostError, OSError):
        raise
    except Exception as error:
        failure = error_for_peer(error)
    finally:
        if descriptor is not None:
            os.close(descriptor)
    if failure is not None:
        await socket.send_error(failure)
    else:
        await socket.send_frame(FrameKind.RESULT)


def _attach(engine: ShardEngine, header: pb.PushPullHeader, descriptor: int) -> None:
    """Map offered memory and use it, unless its worker is no member of the job.

    Raises FencedError, InvalidRequestError or UnreachableError.
    """

    def check_member() -> None:
        outcome = engine.live.machine.outcome(PushKey(header.worker, 0))
        if outcome is not None and outcome.reason == "FENCED":
            raise out_of_the_job(header.worker, outcome.detail)
        if not header.worker:
            raise InvalidRequestError("an observer has no memory to share")

    check_member()
    nbytes = engine.live.require_store().plan.nbytes
    buffers = WorkerBuffers.attached(header.memory, descriptor, nbytes)
    with engine.live.apply_lock:
        check_member()  # it may have left meanwhile
        engine.traffic.shared_buffers.add(header.worker, buffers)
