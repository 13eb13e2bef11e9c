"""A metrics port in the process of the test, and raw connections to it."""

import datetime
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

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
    received = b""
    try:
        while data := sock.recv(1 << 16):
            received += data
    except ConnectionResetError:
        pass
    return received


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


def server_context(folder: Path, name: str) -> ssl.SSLContext:
    """Return the context of a server with a new certificate of its own for 127.0.0.1.

    name: Common name of the certificate; `folder / name` is its file.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    path, key_path = folder / name, folder / f"{name}.key"
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path, key_path)
    return context
