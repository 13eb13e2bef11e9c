"""A stream on a blocking socket, as workers and shards use it (protocol: stream_format.py)."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self, TypeVar

from google.protobuf.message import Message

from pscommon.core.errors import (
    FormatError,
    InvalidRequestError,
    MismatchError,
    PSError,
    UnreachableError,
)
from pscommon.core.formats import check_wire_format
from pscommon.security.credentials import process_credentials
from pscommon.security.tokens import Role, token_for
from pscommon.wire.endpoint import MAX_MESSAGE_BYTES, Endpoint, open_stream, timeout_option
from pscommon.wire.status import error_of, status_of
from pscommon.wire.stream_format import (
    HEAD_BYTES,
    MAGIC,
    MAX_BUFFERS_COUNT,
    PIECE_BYTES,
    SILENCE_SECONDS,
    BufferQueue,
    FrameKind,
    FramePrefix,
    decode_message,
    decode_prefix,
    encode_frame,
)
from pscommon.wire.tls_socket import AnySocket, TlsSocket
from psproto.v1 import parameter_server_pb2 as ps
from psproto.v1 import stream_pb2

CONNECT_SECONDS = 2.0
"""Time for a server to accept a stream and to answer its greeting, in all."""

ALL_INTERFACES = ("0.0.0.0", "[::]")

OTHER_PORT = (
    "Try: give this server an `--advertise-stream HOST:PORT` that leads to its own stream port "
    "(`--stream-bind`)"
)
OTHER_RELEASE = "Try: the same release of paramserver on every machine of the job"

M = TypeVar("M", bound=Message)


class BlockingSocket:
    """An open stream. One thread sends at a time, and one receives.

    Attributes:
        address: Where it leads: HOST:PORT, or the path of a Unix socket.
        is_broken: It cannot be used any more.
        hello: The greeting with which `open` opened it.
    """

    hello = stream_pb2.StreamHello()

    def __init__(self, sock: AnySocket, address: str, peer: str) -> None:
        """peer: Names the peer in errors."""
        self.address, self.is_broken = address, False
        self._socket, self._who = sock, f"{peer} (stream {address})"
        self._head = bytearray(HEAD_BYTES)
        self._sending, self._unsent = threading.Lock(), bytearray()
        self._silence_seconds = 0.0
        self.limit_silence(SILENCE_SECONDS)

    @classmethod
    def open(
        cls,
        address: str,
        hello: stream_pb2.StreamHello,
        server: str,
        seconds: float = CONNECT_SECONDS,
    ) -> Self:
        """Connect and greet the server.

        server: Names the server in errors.
        seconds: Time for the server to accept the connection and to answer, in all.

        Raises:
            UnreachableError: It does not answer in time, or does not take this peer now.
            MismatchError: It serves another job or shard, or does not speak this protocol.
        """
        deadline = time.monotonic() + seconds
        try:
            sock = open_stream(Endpoint(address), seconds)
        except OSError as error:
            text = (
                "no answer" if isinstance(error, BlockingIOError) else error.strerror or str(error)
            )
            raise UnreachableError(
                f"cannot open a stream to {server} at {address}: {text}"
            ) from error
        opened = cls(sock, address, server)
        try:
            opened._greet(hello, deadline)
            opened.limit_silence(SILENCE_SECONDS)
        except BaseException:
            opened.close()
            raise
        opened.hello = hello
        return opened

    def limit_silence(self, seconds: float) -> None:
        """Let reads and writes fail after this time, at most SILENCE_SECONDS, without a byte.

        The kernel measures it: no call before each read.
        """
        seconds = min(seconds, SILENCE_SECONDS)
        if seconds != self._silence_seconds:
            self._silence_seconds = seconds
            if isinstance(self._socket, TlsSocket):
                self._socket.limit_silence(seconds)
                return
            timeout = timeout_option(seconds)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)

    def cancel(self) -> None:
        """End what other threads do with this stream."""
        self.is_broken = True
        with suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def end_sending(self) -> None:
        """Tell the peer that nothing more comes; what it sends can still be received."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket without a farewell: a fork of this process may use the connection."""
        self.is_broken = True
        self._socket.close()

    def send(
        self,
        buffers: Sequence[memoryview | bytes | bytearray],
        moved: Callable[[], None] | None = None,
    ) -> None:
        """Send the buffers. Raises OSError.

        moved: Called after each piece.
        """
        left, queue = _measured(buffers)
        while left:
            nbytes = self._socket.sendmsg(buffers if queue is None else queue.next())
            left -= nbytes
            if left:
                queue = queue or BufferQueue(buffers)
                queue.advance(nbytes)
            if moved is not None:
                moved()

    def receive(
        self,
        buffers: Sequence[memoryview | bytearray],
        filled: Callable[[int], None] | None = None,
    ) -> None:
        """Fill the buffers. Raises OSError.

        filled: Called with the number of bytes so far, after each piece.
        """
        left, queue = _measured(buffers)
        total, sock = left, self._socket
        while left:
            views = buffers if queue is None else queue.next()
            nbytes = (
                sock.recv_into(views[0], 0, socket.MSG_WAITALL)
                if len(views) == 1
                else sock.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
            )
            if not nbytes:
                raise ConnectionResetError("the peer closed the connection")
            left -= nbytes
            if left:
                queue = queue or BufferQueue(buffers)
                queue.advance(nbytes)
            if filled is not None:
                filled(total - left)

    def next_frame(
        self, deadline: float | None, filled: Callable[[int], None] | None = None
    ) -> tuple[FramePrefix, bytes]:
        """Return the next frame that is not ALIVE.

        Args:
            deadline: Time until which the frame must come; None: as long as the peer is alive.
            filled: See `receive`.

        Raises OSError, or InvalidRequestError if it is no frame.
        """
        while True:
            self.receive([self._head], filled)
            prefix = decode_prefix(self._head)
            if prefix.kind is not FrameKind.ALIVE:
                rest = bytearray(prefix.rest_nbytes)
                if rest:
                    self.receive([rest], filled)
                return prefix, prefix.message(self._head, rest)
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError("no answer in time")

    def send_message(self, make: Callable[[], Message | None]) -> None:
        """Make a message and send it in a LINK frame. Raises OSError.

        make: Returns the message; None: there is none. No other thread sends meanwhile, so messages
            are sent in the order in which they are made.
        """
        with self._sending:
            self._add_unsent(make())
            if self._unsent:
                unsent, self._unsent = self._unsent, bytearray()
                self.send([unsent])

    def send_error(self, error: PSError) -> None:
        """Send an error after all messages. Raises OSError."""
        with self._sending:
            unsent, self._unsent = self._unsent, bytearray()
            frame = encode_frame(FrameKind.ERROR, status_of(error).SerializeToString())
            self.send([unsent, frame])

    def try_send_message(self, make: Callable[[], Message | None]) -> bool:
        """Make a message and send it without waiting. Raises OSError.

        Returns False if another thread sends, or the connection is full: then `send_message` goes
        on.
        """
        if not self._sending.acquire(blocking=False):
            return False
        try:
            self._add_unsent(make())
            if self._unsent:
                with suppress(BlockingIOError):
                    del self._unsent[: self._socket.send(self._unsent, socket.MSG_DONTWAIT)]
            return not self._unsent
        finally:
            self._sending.release()

    def _add_unsent(self, message: Message | None) -> None:
        if message is not None:
            raw = message.SerializeToString()
            self._unsent += encode_frame(FrameKind.LINK, data_nbytes=len(raw)) + raw

    def messages(self, kind: type[M]) -> Iterator[M]:
        """Yield the messages of the LINK frames that come.

        Raises OSError when the connection ends, and the PSError that the peer sends.
        """
        while True:
            prefix, message = self.next_frame(None)
            if prefix.kind is FrameKind.ERROR:
                raise error_of(message, self._who)
            if prefix.kind is not FrameKind.LINK or prefix.data_nbytes > MAX_MESSAGE_BYTES:
                raise InvalidRequestError(f"{self._who} sent {prefix}")
            raw = bytearray(prefix.data_nbytes)
            self.receive([raw])
            yield decode_message(kind, raw)

    def lost(self, error: OSError) -> UnreachableError:
        """Return the error for a connection that has failed."""
        self.is_broken = True
        text = (
            f"no bytes for {self._silence_seconds:.3g} s"
            if isinstance(error, BlockingIOError)
            else error.strerror or str(error)
        )
        return UnreachableError(f"{self._who} does not answer: {text}", "UNREACHABLE")

    def _greet(self, hello: stream_pb2.StreamHello, deadline: float) -> None:
        """Exchange greetings until the deadline, also with a peer that sends byte by byte."""

        def limit(_: int = 0) -> None:
            self.limit_silence(_remaining(deadline))

        try:
            limit()
            self.send([MAGIC, encode_frame(FrameKind.HELLO, _with_token(hello))])
            magic = bytearray(len(MAGIC))
            self.receive([magic], limit)
            self._check_magic(bytes(magic))
            prefix, message = self.next_frame(deadline, limit)
            if prefix.kind is FrameKind.WELCOME:
                welcome = decode_message(stream_pb2.StreamWelcome, message)
                check_wire_format(welcome.format, self._who, "this process")
                return
            if prefix.kind is not FrameKind.ERROR:
                raise InvalidRequestError(f"it answered {prefix.kind.name}")
        except OSError as error:
            raise self.lost(error) from error
        except InvalidRequestError as error:
            raise MismatchError(
                f"{self._who} speaks another release of this protocol: {error}. {OTHER_RELEASE}",
                "SHARD_MISMATCH",
            ) from error
        raise self._refusal(error_of(message, self._who))

    def _check_magic(self, magic: bytes) -> None:
        if magic == MAGIC:
            return
        problem, remedy = "is no stream port of this software", OTHER_PORT
        if magic.startswith(MAGIC.rstrip(b"0123456789")):
            problem, remedy = f"speaks another release of the protocol {MAGIC!r}", OTHER_RELEASE
        raise MismatchError(
            f"{self._who} {problem}: it answered {magic!r}. {remedy}", "SHARD_MISMATCH"
        )

    def _refusal(self, error: PSError) -> PSError:
        """Return the error with which a peer answered the greeting, with the address."""
        if not isinstance(error, MismatchError) or isinstance(error, FormatError):
            return error
        return MismatchError(f"{self._who} is another server: {error}. {OTHER_PORT}", error.reason)


def socket_addresses(description: ps.DescribeResponse, address: str, lanes: str) -> list[str]:
    """Return where a server's streams can be reached, the best way first.

    Args:
        description: The server's description.
        address: Its gRPC address. Its host replaces one that names all interfaces.
        lanes: What the caller may use: `stream` is TCP only, and `shm` the Unix socket only.
    """
    path = description.stream_path if lanes != "stream" else ""
    tcp = description.stream_address if lanes != "shm" else ""
    host, _, port = tcp.rpartition(":")
    if host in ALL_INTERFACES:
        tcp = f"{address.rpartition(':')[0]}:{port}"
    return [*([path] if path and Path(path).exists() else []), *([tcp] if tcp else [])]


def _with_token(hello: stream_pb2.StreamHello) -> bytes:
    """Return the greeting with this process's token of the role that it needs."""
    tokens = process_credentials().tokens
    if tokens is None:
        return hello.SerializeToString()
    role: Role = "server" if hello.purpose == stream_pb2.StreamHello.PURPOSE_SHARD else "worker"
    sent = stream_pb2.StreamHello(token=token_for(tokens(), role))
    sent.MergeFrom(hello)
    return sent.SerializeToString()


def _remaining(deadline: float) -> float:
    """Return the seconds until then. Raises TimeoutError if it has passed."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("no answer in time")
    return seconds


def _measured(
    buffers: Sequence[memoryview | bytes | bytearray],
) -> tuple[int, BufferQueue | None]:
    """Return the size of the buffers, and a queue unless one system call may take them all."""
    nbytes = 0
    for buffer in buffers:
        nbytes += memoryview(buffer).nbytes
    is_small = nbytes <= PIECE_BYTES and len(buffers) <= MAX_BUFFERS_COUNT
    return nbytes, None if is_small else BufferQueue(buffers)
