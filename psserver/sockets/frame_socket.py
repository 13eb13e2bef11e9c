"""A non-blocking socket in an event loop: frames, and bytes from and to the caller's memory."""

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Sequence

from pscommon.core.errors import PSError
from pscommon.wire.status import status_of
from pscommon.wire.stream_format import (
    HEAD_BYTES,
    MAX_BUFFERS_COUNT,
    MAX_FRAME_MESSAGE_BYTES,
    PIECE_BYTES,
    BufferQueue,
    FrameKind,
    FramePrefix,
    decode_prefix,
    encode_frame,
)
from pscommon.wire.tls_socket import AnySocket, TlsSocket
from psserver.parameters.weight_reads import WeightRead

PIECES_PER_TURN_COUNT = 4
"""Reads or writes of one socket before other sockets of its loop have their turn."""


class ConnectionLostError(Exception):
    """The peer has closed the connection."""


class FrameSocket:
    """One socket, registered with an event loop until `close`. One coroutine at a time uses it.

    The loop's callbacks move the bytes: a coroutine resumes once, when all of them have moved.

    Attributes:
        is_moving: Bytes are being received or sent.
        is_secured: The connection uses TLS.
    """

    def __init__(
        self,
        sock: AnySocket,
        loop: asyncio.AbstractEventLoop,
        lost: Callable[[], None],
    ) -> None:
        """lost: Called if the peer hangs up while nothing is received or sent."""
        self.is_moving, self.is_secured = False, isinstance(sock, TlsSocket)
        self._socket, self._loop, self._lost = sock, loop, lost
        self._step: Callable[[], bool] | None = None
        self._moved: asyncio.Future[None] | None = None
        self._is_writing = False
        self._is_reading = True
        loop.add_reader(sock.fileno(), self._on_readable)

    async def shake_hands(self) -> None:
        """Make the TLS handshake, if the connection has one. Raises OSError."""
        sock = self._socket
        if isinstance(sock, TlsSocket):

            def shake() -> bool:
                sock.do_handshake()
                return True

            await self._move(shake, is_writing=False)

    async def receive(
        self,
        buffers: Sequence[memoryview | bytearray],
        filled: Callable[[int], None] | None = None,
    ) -> None:
        """Fill the buffers of bytes, one after another.

        filled: Called with the number of bytes so far, after each piece.

        Raises ConnectionLostError or OSError.
        """
        total, received = sum(map(len, buffers)), 0
        if not total:
            return
        try:  # most bytes are there already
            received = self._socket.recvmsg_into(buffers[:MAX_BUFFERS_COUNT])[0]
            if not received:
                raise ConnectionLostError
        except BlockingIOError:
            pass
        if not self._is_reading:  # also to notice that the peer hangs up
            self._loop.add_reader(self._socket.fileno(), self._on_readable)
            self._is_reading = True
        if received == total:
            if filled is not None:
                filled(total)
            return
        queue = BufferQueue(buffers)
        queue.advance(received)

        def fill() -> bool:
            views = queue.next()
            nbytes = (
                self._socket.recv_into(views[0])
                if len(views) == 1
                else self._socket.recvmsg_into(views)[0]
            )
            if not nbytes:
                raise ConnectionLostError
            queue.advance(nbytes)
            if filled is not None:
                filled(total - queue.remaining_nbytes)
            return not queue.remaining_nbytes

        await self._move(fill, is_writing=False)

    async def receive_descriptor(self) -> int | None:
        """Receive one byte, and return the one file descriptor that came with it; None: not one.

        The caller closes it. Raises ConnectionLostError or OSError.
        """
        sock, found = self._socket, list[int]()
        assert isinstance(sock, socket.socket)

        def take() -> bool:
            most_nbytes = socket.CMSG_LEN(struct.calcsize("i"))
            byte, ancillary, flags, _ = sock.recvmsg(1, most_nbytes, socket.MSG_CMSG_CLOEXEC)
            for _, kind, data in ancillary:
                if kind == socket.SCM_RIGHTS:
                    found.extend(struct.unpack("i", data))
            if not byte:
                raise ConnectionLostError
            if flags & socket.MSG_CTRUNC:  # the kernel has dropped further ones
                _close_all(found)
            return True

        try:
            await self._move(take, is_writing=False)
        except BaseException:
            _close_all(found)
            raise
        return found[0] if found else None

    async def send(self, buffers: Sequence[memoryview | bytes]) -> None:
        """Send the buffers, one after another. Raises OSError."""
        try:
            sent = self._socket.sendmsg(buffers[:MAX_BUFFERS_COUNT])
        except BlockingIOError:
            sent = 0
        if sent == sum(map(len, buffers)):
            return None
        queue = BufferQueue(buffers)
        queue.advance(sent)

        def put() -> bool:
            queue.advance(self._socket.sendmsg(queue.next()))
            return not queue.remaining_nbytes

        return await self._move(put, is_writing=True)

    async def send_from(self, read: WeightRead, moved: Callable[[], None]) -> None:
        """Send the bytes of a read from where they are. Raises OSError.

        moved: Called after each piece.
        """

        def put() -> bool:
            read.take(PIECE_BYTES, lambda views: self._socket.sendmsg(views[:MAX_BUFFERS_COUNT]))
            moved()
            return not read.remaining_nbytes

        if read.remaining_nbytes:
            await self._move(put, is_writing=True)

    def send_now(self, frame: bytes) -> None:
        """Send a few bytes if there is room for them."""
        try:
            self._socket.send(frame)
        except BlockingIOError:
            pass
        except OSError:
            self._lost()

    # ---- frames ----------------------------------------------------------------------------------

    async def receive_frame(
        self, most_nbytes: int = MAX_FRAME_MESSAGE_BYTES
    ) -> tuple[FramePrefix, bytes]:
        """Return the next frame's prefix and message; its data are not received yet.

        most_nbytes: The longest message that is taken.

        Raises InvalidRequestError if it is no frame, ConnectionLostError or OSError.
        """
        head = bytearray(HEAD_BYTES)
        await self.receive([head])
        prefix = decode_prefix(head, most_nbytes)
        rest = bytearray(prefix.rest_nbytes)
        if rest:
            await self.receive([rest])
        return prefix, prefix.message(head, rest)

    async def discard(self, nbytes: int) -> None:
        """Receive bytes and drop them."""
        while nbytes > 0:
            await self.receive([bytearray(min(nbytes, PIECE_BYTES))])
            nbytes -= PIECE_BYTES

    async def send_frame(self, kind: FrameKind, message: bytes = b"", data: bytes = b"") -> None:
        await self.send([encode_frame(kind, message, len(data)), data])

    async def send_error(self, error: PSError) -> None:
        await self.send_frame(FrameKind.ERROR, status_of(error).SerializeToString())

    async def send_prefix(self, kind: FrameKind, message: bytes, data_nbytes: int) -> None:
        """Send a frame without its data, which follow."""
        await self.send([encode_frame(kind, message, data_nbytes)])

    # ---- the end, and the callbacks of the loop --------------------------------------------------

    def close(self) -> None:
        """Close the socket. Repeating it is harmless."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()

    def detach(self) -> socket.socket:
        """Return the socket, blocking, and forget it. It has no TLS."""
        assert isinstance(self._socket, socket.socket)
        self._loop.remove_reader(self._socket.fileno())
        family, kind, protocol = self._socket.family, self._socket.type, self._socket.proto
        detached = socket.socket(family, kind, protocol, fileno=self._socket.detach())
        detached.setblocking(True)
        return detached

    async def _move(self, step: Callable[[], bool], is_writing: bool) -> None:
        """Repeat a step whenever the socket allows it, until it returns True."""
        self.is_moving = True
        try:
            if is_writing and self._repeat(step):
                return
            self._step, self._is_writing = step, is_writing
            self._moved = self._loop.create_future()
            if is_writing:
                self._loop.add_writer(self._socket.fileno(), self._continue)
            await self._moved
        finally:
            self.is_moving, self._step = False, None
            if is_writing and self._moved is not None and self._socket.fileno() >= 0:
                self._loop.remove_writer(self._socket.fileno())
            self._moved = None

    @staticmethod
    def _repeat(step: Callable[[], bool]) -> bool:
        """Repeat a step as often as one turn allows; return whether all bytes have moved."""
        try:
            for _ in range(PIECES_PER_TURN_COUNT):
                if step():
                    return True
        except BlockingIOError:
            pass
        return False

    def _continue(self) -> None:
        moved = self._moved
        if self._step is None or moved is None or moved.done():
            return
        try:
            if self._repeat(self._step):
                moved.set_result(None)
            elif isinstance(self._socket, TlsSocket) and self._socket.pending():
                # received already, so the loop will not call for it
                self._loop.call_soon(self._continue)
        except Exception as error:
            moved.set_exception(error)

    def _on_readable(self) -> None:
        if self._step is not None and not self._is_writing:
            self._continue()
            return
        try:
            has_hung_up = not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:  # the bytes were received since the loop saw them
            return
        except OSError:
            has_hung_up = True
        # readable from now on: the loop would call again and again
        self._loop.remove_reader(self._socket.fileno())
        self._is_reading = False
        if has_hung_up:
            self._lost()


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())
