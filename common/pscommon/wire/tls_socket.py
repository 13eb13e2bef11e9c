"""A TLS connection with those calls of a socket that streams make.

An `ssl.SSLSocket` lacks `sendmsg`, `recvmsg_into` and MSG_PEEK, gives at most one record (16 KiB)
per call, and may hold received bytes while its file descriptor is not readable (`pending`). Its
`shutdown` continues in plain text. A write that could not complete must be repeated with the same
bytes: callers repeat from where they stopped, and `send` keeps what it could not send.
"""

import socket
import ssl
from collections.abc import Iterator, Sequence

RECORD_BYTES = 16 << 10
"""Most bytes of one TLS record. Smaller buffers are joined to fill one."""

Buffer = memoryview | bytes | bytearray


class TlsSocket:
    """One connection; not even one sender and one receiver may use it at the same time.

    All calls raise OSError, and BlockingIOError where a socket does.

    Attributes:
        family: Address family of the socket.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._socket, self.family = sock, sock.family
        self._peeked = b""
        self._unsent = b""
        self.fileno = sock.fileno
        self.close = sock.close
        self.pending = sock.pending

    def do_handshake(self) -> None:
        """Shake hands; repeat it after BlockingIOError."""
        try:
            self._socket.do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error

    def limit_silence(self, seconds: float) -> None:
        """Let reads and writes fail after this time without a byte. Kernel timeouts do not."""
        self._socket.settimeout(seconds)

    def recv_into(self, view: Buffer, nbytes: int = 0, flags: int = 0) -> int:
        """Receive into the view; 0: the peer has closed the connection.

        flags: With MSG_WAITALL, all bytes.
        """
        return self.recvmsg_into([view], 0, flags)[0]

    def recvmsg_into(
        self, views: Sequence[Buffer], ancillary_nbytes: int = 0, flags: int = 0
    ) -> tuple[int]:
        """Receive into the views, as many bytes as have come (or all, with MSG_WAITALL)."""
        total = 0
        for each in views:
            view = memoryview(each).cast("B")
            while view:
                nbytes = self._receive(view, total > 0 and not flags & socket.MSG_WAITALL)
                if not nbytes:
                    return (total,)
                total += nbytes
                view = view[nbytes:]
        return (total,)

    def recv(self, nbytes: int, flags: int) -> bytes:
        """Return the next byte, which stays (MSG_PEEK); empty: the peer has closed."""
        assert (nbytes, flags) == (1, socket.MSG_PEEK)
        if not self._peeked:
            byte = bytearray(1)
            self._peeked = bytes(byte[: self._receive(memoryview(byte), False)])
        return self._peeked

    def sendmsg(self, buffers: Sequence[Buffer]) -> int:
        """Send from the buffers; return the number of bytes."""
        self._flush()
        total = 0
        try:
            for piece in _pieces(buffers):
                while piece:
                    sent = self._send(piece)
                    total, piece = total + sent, piece[sent:]
        except BlockingIOError:
            if not total:
                raise
        return total

    def send(self, data: Buffer, flags: int = 0) -> int:
        """Send a few bytes. What finds no room now is sent before the next bytes."""
        self._flush()
        try:
            sent = self._send(data)
        except BlockingIOError:
            sent = 0
        self._unsent = bytes(data[sent:])
        return len(data)

    def shutdown(self, how: int) -> None:
        """End the connection below TLS."""
        socket.socket.shutdown(self._socket, how)

    def _flush(self) -> None:
        while self._unsent:
            self._unsent = self._unsent[self._send(self._unsent) :]

    def _send(self, data: Buffer) -> int:
        try:
            return self._socket.send(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, TimeoutError) as error:
            raise BlockingIOError from error

    def _receive(self, view: memoryview, or_nothing: bool) -> int:
        """Receive into the view; 0 at the end, and with `or_nothing` also where it would block."""
        if self._peeked:
            view[:1], self._peeked = self._peeked, b""
            return 1
        try:
            return self._socket.recv_into(view)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, TimeoutError) as error:
            if or_nothing:
                return 0
            raise BlockingIOError from error


AnySocket = socket.socket | TlsSocket
"""The socket of a stream."""


def _pieces(buffers: Sequence[Buffer]) -> Iterator[memoryview]:
    """Yield the bytes in pieces of at least one record, but for the last. Large buffers stay."""
    joined = bytearray()
    for each in buffers:
        view = memoryview(each).cast("B")
        if joined:
            absent = RECORD_BYTES - len(joined)
            joined += view[:absent]
            view = view[absent:]
            if len(joined) < RECORD_BYTES:
                continue
            yield memoryview(joined)
            joined = bytearray()
        if len(view) < RECORD_BYTES:
            joined += view
        else:
            yield view
    if joined:
        yield memoryview(joined)
