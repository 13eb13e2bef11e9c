"""A worker's connection over a stream: its greeting, then one exchange after another."""

import asyncio
import ssl
import threading
from collections.abc import Callable, Mapping

from pscommon.core.errors import (
    AuthenticationError,
    InvalidRequestError,
    MismatchError,
    PSError,
)
from pscommon.core.formats import check_wire_format, spoken_format
from pscommon.core.limits import MAX_REQUEST_STREAMS, MAX_UNGREETED_STREAMS
from pscommon.security.tokens import Role
from pscommon.telemetry.logs import get_logger
from pscommon.wire.requests import STREAM_FIELDS
from pscommon.wire.status import error_for_peer
from pscommon.wire.stream_format import (
    ALIVE_INTERVAL_SECONDS,
    HELLO_SECONDS,
    MAGIC,
    MAX_HELLO_BYTES,
    FrameKind,
    decode_message,
    encode_frame,
)
from pscommon.wire.tls_socket import AnySocket
from psproto.v1 import stream_pb2 as pb
from psserver.process.access import check_token
from psserver.process.handlers import Handlers, answer
from psserver.process.identity import ServerIdentity
from psserver.shard.observers import ShardObserver
from psserver.sockets.event_loop import SocketService, SocketWaiter
from psserver.sockets.frame_socket import ConnectionLostError, FrameSocket
from psserver.sockets.shard_links import ShardLinks
from psserver.sockets.socket_exchange import serve_exchange, serve_offer

ALIVE = encode_frame(FrameKind.ALIVE)
ROWS = {name: row for row, name in STREAM_FIELDS.items()}

UNGREETED = (-1, -1)
"""In place of worker and purpose, until the peer has greeted this server."""

MAX_STREAMS: Mapping[int, int] = {
    pb.StreamHello.PURPOSE_UNSPECIFIED: 1,
    pb.StreamHello.PURPOSE_REQUESTS: MAX_REQUEST_STREAMS,
}
"""Streams of one worker, by purpose."""

log = get_logger(__name__)


Close = Callable[[bool], None]
"""Closes a stream without waiting; with False only if it is receiving a push, or sending."""


class OpenConnections(ShardObserver):
    """The open streams of a port, by worker and purpose. Thread-safe.

    Where there are too many, the newest closes the oldest: a worker has given up an earlier stream
    for tensors. The streams whose peers have not greeted this server yet count together.
    """

    def __init__(self) -> None:
        self._closers: dict[tuple[int, int], dict[Close, None]] = {}  # oldest first
        self._lock = threading.Lock()

    def opened(self, key: tuple[int, int], close: Close) -> None:
        """Count a stream of a worker and a purpose, or one of UNGREETED.

        Observers (worker 0) may have any number.
        """
        worker, purpose = key
        limit = MAX_UNGREETED_STREAMS if key == UNGREETED else MAX_STREAMS[purpose]
        if worker:
            with self._lock:
                closers = self._closers.setdefault(key, {})
                closers[close] = None
                oldest = next(iter(closers)) if len(closers) > limit else None
                if oldest is not None:
                    del closers[oldest]
            if oldest is not None:
                oldest(True)

    def closed(self, key: tuple[int, int], close: Close) -> None:
        """Count a stream no longer. Repeating it is harmless."""
        with self._lock:
            closers = self._closers.get(key, {})
            closers.pop(close, None)
            if not closers:
                self._closers.pop(key, None)

    def on_evict(self, worker: int) -> None:
        """End the transfer of a worker that is no longer a member, and free its memory.

        A stream that moves no bytes stays: the worker's next request is answered with the reason.
        """
        with self._lock:
            closers = list(self._closers.get((worker, pb.StreamHello.PURPOSE_UNSPECIFIED), ()))
        for close in closers:
            close(False)


class WorkerConnection:
    """Serves one connection in an event loop until either side closes it.

    handlers: answer requests to the coordinator; None on other shards.
    links: serves connections of other shards; None on other shards.
    """

    def __init__(
        self,
        sock: AnySocket,
        identity: ServerIdentity,
        service: SocketService,
        streams: OpenConnections,
        handlers: Handlers | None,
        links: ShardLinks | None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._identity, self._service, self._keys = identity, service, identity.worker_keys
        self._streams, self._handlers, self._links = streams, handlers, links
        self._key, self._job_key = UNGREETED, b""
        self._answers_since: float | None = None
        self._socket = FrameSocket(sock, self._loop, self._cancel)
        streams.opened(self._key, self.close)
        self.task = self._loop.create_task(self._run())
        self.task.add_done_callback(self._clean_up)  # also if the task has never started

    def keep_alive(self) -> None:
        """Tell a worker that waits for an answer that this server works on it."""
        since = self._answers_since
        if (
            since is not None
            and not self._socket.is_moving
            and self._loop.time() - since >= ALIVE_INTERVAL_SECONDS
        ):
            self._socket.send_now(ALIVE)

    def close(self, always: bool) -> None:
        """Close the stream, or only if it is receiving or sending. From any thread."""

        def cancel() -> None:
            if always or (self._socket.is_moving and self._answers_since is not None):
                self._cancel()

        self._loop.call_soon_threadsafe(cancel)

    def _cancel(self) -> None:
        self.task.cancel()

    async def _run(self) -> None:
        try:
            hello = await self._greet()
            if hello.purpose == pb.StreamHello.PURPOSE_SHARD:
                self._hand_over()
                return
            while True:
                await self._serve_frame()
        except (ConnectionLostError, OSError):
            log.debug("stream_closed", worker=self._key[0])
        except PSError as error:
            log_refusal(str(error))

    def _clean_up(self, task: "asyncio.Task[None]") -> None:
        self._streams.closed(self._key, self.close)
        self._socket.close()

    def _hand_over(self) -> None:
        """Let other threads serve this connection of another shard."""
        assert self._links is not None
        self._links.serve(self._socket.detach())

    async def _greet(self) -> pb.StreamHello:
        message = await _receive_hello(self._socket)
        try:
            hello = decode_message(pb.StreamHello, message)
            self._check(hello)
        except PSError as error:
            await _refuse(self._socket, error)
            raise
        self._streams.closed(self._key, self.close)
        welcome = pb.StreamWelcome(format=spoken_format())
        if hello.purpose in MAX_STREAMS:
            self._key = hello.worker, hello.purpose
            self._streams.opened(self._key, self.close)
        await self._socket.send(
            [MAGIC, encode_frame(FrameKind.WELCOME, welcome.SerializeToString())]
        )
        return hello

    def _check(self, hello: pb.StreamHello) -> None:
        role: Role = "server" if hello.purpose == pb.StreamHello.PURPOSE_SHARD else "worker"
        check_token(hello.token, role, "a stream")
        if hello.purpose == pb.StreamHello.PURPOSE_SHARD:
            if self._links is None:
                raise MismatchError("only shard 0 serves other shards", "SHARD_MISMATCH")
            if self._socket.is_secured:
                raise MismatchError("shards use gRPC where there is TLS", "SHARD_MISMATCH")
            return  # its first message is checked as over gRPC
        check_wire_format(hello.format, f"worker {hello.worker}", "this server")
        self._identity.check_job(hello.job)
        if hello.shard != self._identity.shard:
            raise MismatchError(
                f"this is shard {self._identity.shard}, not shard {hello.shard}", "SHARD_MISMATCH"
            )
        self._identity.check_term(hello.term)
        self._job_key = self._keys.job_key
        self._keys.check(hello.worker, hello.key)

    async def _serve_frame(self) -> None:
        prefix, message = await self._socket.receive_frame()
        if prefix.kind in (FrameKind.DATA, FrameKind.CLOSE):  # of a push that was refused
            await self._socket.discard(prefix.data_nbytes)
            return
        self._answers_since = self._loop.time()
        try:
            if prefix.kind is FrameKind.EXCHANGE:
                await serve_exchange(
                    self._service, self._socket, message, prefix.data_nbytes, self._check_sender
                )
            elif prefix.kind is FrameKind.MEMORY and not self._socket.is_secured:
                await serve_offer(self._service, self._socket, message, self._check_sender)
            elif prefix.kind is FrameKind.REQUEST and self._handlers is not None:
                await self._answer(self._handlers, message)
            else:
                raise InvalidRequestError(f"a worker sent {prefix.kind.name}")
        finally:
            self._answers_since = None

    def _check_sender(self, worker: int) -> None:
        """Check that a message of this worker may come on this stream.

        Raises:
            AuthenticationError: Another worker has opened it.
            ConnectionLostError: The key of its greeting was of an earlier job key.
        """
        own = self._key[0]
        if worker != own:
            raise AuthenticationError(
                f"a request of worker {worker} is refused: worker {own} has opened the stream. "
                "Try: a stream for each worker",
                "UNAUTHENTICATED",
            )
        if self._keys.job_key is not self._job_key:
            raise ConnectionLostError

    async def _answer(self, handlers: Handlers, message: bytes) -> None:
        """Answer a request to the coordinator. One that waits occupies no thread."""
        try:
            sent = decode_message(pb.CoordinatorRequest, message)
            name = sent.WhichOneof("request")
            if name is None:
                raise InvalidRequestError("the coordinator does not know this request")
            row, request, waiter = ROWS[name], getattr(sent, name), SocketWaiter(self._service)
            self._check_sender(request.worker)
            with self._service.timing(row.name):
                response = await answer(handlers, row, request, waiter)
        except (ConnectionLostError, OSError):
            raise
        except Exception as failure:
            await self._socket.send_error(error_for_peer(failure))
            return
        await self._socket.send_frame(FrameKind.RESULT, response.SerializeToString())


def refuse_connection(
    sock: AnySocket,
    error: PSError,
    streams: OpenConnections,
) -> tuple["asyncio.Task[None]", Callable[[], None]]:
    """Answer the greeting on one connection with an error, as a standby does."""

    async def answer() -> None:
        try:
            await _receive_hello(frames)
            await _refuse(frames, error)
        except (ConnectionLostError, OSError) as lost:
            log.debug("stream_closed", problem=str(lost))
        except PSError as problem:
            log_refusal(str(problem))

    def cancel() -> None:
        task.cancel()

    def close(always: bool) -> None:
        loop.call_soon_threadsafe(cancel)

    def clean_up(task: "asyncio.Task[None]") -> None:
        streams.closed(UNGREETED, close)
        frames.close()

    loop = asyncio.get_running_loop()
    frames = FrameSocket(sock, loop, cancel)
    streams.opened(UNGREETED, close)
    task = loop.create_task(answer())
    task.add_done_callback(clean_up)
    return task, lambda: None  # the answer takes no time


def log_refusal(problem: str) -> None:
    """Log that a peer of the stream port was refused."""
    log.warning("stream_refused", limited=True, problem=problem)


async def _receive_hello(sock: FrameSocket) -> bytes:
    """Return the greeting of a peer. Raises InvalidRequestError if it sends none in time."""
    try:
        async with asyncio.timeout(HELLO_SECONDS):
            await sock.shake_hands()
            magic = bytearray(len(MAGIC))
            await sock.receive([magic])
            if magic != MAGIC:
                raise InvalidRequestError(
                    f"the peer does not speak this protocol: {bytes(magic)!r}"
                )
            prefix, message = await sock.receive_frame(MAX_HELLO_BYTES)
    except TimeoutError:
        raise InvalidRequestError(f"no greeting within {HELLO_SECONDS:.0f} s") from None
    except ssl.SSLError as error:
        raise InvalidRequestError(f"no TLS connection: {error.reason or error}") from None
    if prefix.kind is not FrameKind.HELLO:
        raise InvalidRequestError(f"the peer began with {prefix.kind.name}")
    return message


async def _refuse(sock: FrameSocket, error: PSError) -> None:
    """Answer a greeting with an error."""
    await sock.send([MAGIC])
    await sock.send_error(error)
