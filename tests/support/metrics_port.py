"""A metrics port in the process of the test, and raw connections to it."""

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pscommon.security.certificates import init_tls
from pscommon.security.tls import Tls
from pscommon.security.tls_files import TlsFiles
from pscommon.telemetry.http import MetricsServer, new_registry
from pscommon.wire.endpoint import Endpoint, listen_http

SECONDS = 20.0


class Probe:
    """Fake process with a readiness that the test sets, and arguments for its MetricsServer."""

    def __init__(self, **arguments: Any) -> None:
        self.state = (True, "serving version 7")
        self.registry = new_registry()
        self.monitor = MetricsServer(
            listen_http(Endpoint("127.0.0.1:0")), self.registry, lambda: self.state, **arguments
        )

    def connect(self) -> socket.socket:
        host, _, port = self.monitor.address.rpartition(":")
        return socket.create_connection((host, int(port)), SECONDS)

    def send(self, sent: bytes) -> bytes:
        """Return all that the port answers to these bytes and an end of the stream."""
        with self.connect() as sock:
            with suppress(OSError):  # the port may be the first to end
                sock.sendall(sent)
                sock.shutdown(socket.SHUT_WR)
            return read_all(sock)

    def status(self, *lines: str) -> int:
        """Return the status of the answer to a request of these lines."""
        answer = self.send("".join(f"{line}\r\n" for line in (*lines, "")).encode())
        return int(answer.split(b" ")[1])


def read_all(sock: socket.socket) -> bytes:
    """Return all bytes until the peer ends the stream or the connection."""
    received = bytearray()
    try:
        while data := sock.recv(1 << 16):
            received += data
    except ConnectionResetError:
        pass
    return bytes(received)


def ended(sock: socket.socket) -> bool:
    """Return whether the peer has closed a silent connection."""
    sock.setblocking(False)
    try:
        return not sock.recv(1)
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


@contextmanager
def many(probe: Probe, number: int) -> Iterator[list[socket.socket]]:
    """Open connections that send nothing."""
    opened: list[socket.socket] = []
    try:
        opened += (probe.connect() for _ in range(number))
        yield opened
    finally:
        for sock in opened:
            sock.close()


def server_tls(folder: Path) -> Tls:
    """Return the TLS of a server for 127.0.0.1; the folder gets its files, or has them."""
    init_tls(folder, ["127.0.0.1"])
    files = TlsFiles(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")
    return Tls(files)


def browser_context(folder: Path) -> ssl.SSLContext:
    """Return the context of a client without a certificate."""
    return ssl.create_default_context(cafile=folder / "ca.pem")
