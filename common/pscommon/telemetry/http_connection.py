"""A connection to the metrics port in an event loop, plain or TLS.

asyncio's streams would take 256 KiB for each handshake, before the peer has proved anything.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

RECEIVE_BYTES = 4096

_END_OF_HEAD = b"\r\n\r\n"

T = TypeVar("T")


class HttpConnection:
    """One accepted connection.

    Its methods raise OSError, and EOFError if the peer has ended the connection.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock, self._received = sock, b""

    async def begin(self, tls: Callable[[], ssl.SSLContext]) -> None:
        """Carry out the handshake. A silent peer costs no memory for TLS."""
        await self._wait(to_write=False)
        self._sock.getpeername()  # fails for a peer that is gone: wrap_socket would close no socket
        context = tls()
        self._sock = context.wrap_socket(
            self._sock, server_side=True, do_handshake_on_connect=False
        )
        await self._do(self._sock.do_handshake)

    async def read_head(self, max_bytes: int) -> bytes | None:
        """Return the next request up to its empty line; None: it is larger than `max_bytes`."""
        while (end := self._received.find(_END_OF_HEAD)) < 0 and len(self._received) < max_bytes:
            data = await self._do(partial(self._sock.recv, RECEIVE_BYTES))
            if not data:
                raise EOFError
            self._received += data
        end += len(_END_OF_HEAD)
        if not len(_END_OF_HEAD) <= end <= max_bytes:
            return None
        head, self._received = self._received[:end], self._received[end:]
        return head

    async def send(self, data: bytes) -> None:
        """Send data; returns when the kernel has all of it."""
        rest = memoryview(data)
        while rest:
            sent = await self._do(partial(self._sock.send, rest), to_write=True)
            rest = rest[sent:]

    async def hang_up(self) -> None:
        """End the connection such that the peer can read the last answer: wait for its end."""
        if isinstance(self._sock, ssl.SSLSocket):
            with suppress(ssl.SSLWantReadError):  # the peer's farewell; this one's is sent
                self._sock.unwrap()
        self._sock.shutdown(socket.SHUT_WR)
        while await self._do(partial(self._sock.recv, RECEIVE_BYTES)):
            pass

    def close(self) -> None:
        """Close the connection at once."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # a fork of this process may have a copy
        self._sock.close()

    async def _do(self, act: Callable[[], T], to_write: bool = False) -> T:
        """Act as soon as it does not block."""
        while True:
            try:
                return act()
            except BlockingIOError:
                waits_to_write = to_write
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                waits_to_write = isinstance(error, ssl.SSLWantWriteError)
            await self._wait(waits_to_write)

    async def _wait(self, to_write: bool) -> None:
        loop, is_ready = asyncio.get_running_loop(), asyncio.Event()
        add, remove = (
            (loop.add_writer, loop.remove_writer)
            if to_write
            else (loop.add_reader, loop.remove_reader)
        )
        add(self._sock, is_ready.set)
        try:
            await is_ready.wait()
        finally:
            remove(self._sock)
