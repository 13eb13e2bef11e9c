"""Peers at stream ports that are no servers of the job."""

import socket
import threading
from contextlib import suppress

from psserver.server import Server


class Peer(threading.Thread):
    """Listens on a port, sends the same bytes to everyone who says something, and waits.

    Attributes:
        address: Where it listens.
        connections: Number of connections so far.
        is_connected: There is one now.
    """

    def __init__(self, answer: bytes = b"", pace: float = 0.0) -> None:
        """pace: Seconds between the bytes; 0: all at once."""
        super().__init__(daemon=True)
        self._answer, self._pace = answer, pace
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.connections, self.is_connected = 0, False
        self.start()

    def run(self) -> None:
        while True:
            try:
                sock = self._listening.accept()[0]
            except OSError:
                return
            self.connections, self.is_connected = self.connections + 1, True
            with sock, suppress(OSError):
                sock.recv(1 << 16)
                self._send(sock)
                while sock.recv(1 << 16):
                    pass
            self.is_connected = False

    def _send(self, sock: socket.socket) -> None:
        if not self._pace:
            sock.sendall(self._answer)
            return
        sock.settimeout(self._pace)
        for byte in self._answer:
            sock.sendall(bytes([byte]))
            with suppress(TimeoutError):
                if not sock.recv(1 << 16):
                    return
        sock.settimeout(None)

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.join()


def close_all(server: Server) -> None:
    """Close all streams of workers with a server."""
    streams = server._streams._port.streams
    with streams._lock:
        closers = [close for each in streams._closers.values() for close in each]
    for close in closers:
        close(True)
