"""Opens all connections and all listening sockets of a process.

An Endpoint is made where it is opened, and an address is text elsewhere: credentials belong to the
process, so they are a field whose default the settings set once at the start. With certificates,
all TCP connections use TLS; Unix sockets never do.

Measured effects of settings that differ from the defaults (gRPC core documents channel arguments
and keepalive); two more settings are in pscommon/__init__.py:

- `http2.ping_timeout_ms`: by default a stopped peer is detected only after a minute;
  `keepalive_timeout_ms` has no effect on that.
- `http2.min_ping_interval_without_data_ms`: by default a server disconnects clients with our
  ping interval.
- `so_reuseport`: by default two servers can share one port, and each gets some of the clients.
- `max_reconnect_backoff_ms`: the default grows to two minutes. After the kill of a server, workers
  pushed again after 1.8 s (median) with 1 s, after 1.4 s with 0.25 s.
- `min_reconnect_backoff_ms` bounds one connection attempt, 20 s by default. An attempt that hangs
  delays the detection of a recovered network. An attempt needs two round trips: over a full line
  of 2 Mbit/s connecting took 9 s with 1 s per attempt, 2 s with 2.5 s.
- `dns_min_time_between_resolutions_ms`: by default names are resolved at most once in 30 s; a
  server with a new address was found after 24 s.
- The answer to a ping queues behind 1 to 2 MB of data. With a timeout of 2.2 s a large push over
  5 Mbit/s never arrived, since its connection was considered dead. So tensors use separate
  connections with a longer timeout; heartbeats and shard reports detect lost peers.
- `keepalive_timeout_ms` becomes TCP_USER_TIMEOUT: unacknowledged packets end any connection.
"""

import errno
import os
import socket
import struct
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from pscommon.core.errors import InvalidRequestError, TakenError
from pscommon.security.credentials import Credentials, process_credentials
from pscommon.security.settings import is_loopback
from pscommon.security.tls import Tls
from pscommon.security.tls_files import SERVER_NAME
from pscommon.wire.stream_format import SILENCE_SECONDS
from pscommon.wire.tls_socket import AnySocket, TlsSocket

BACKLOG_COUNT = 1024
RETRY_PAUSE_SECONDS = 0.05

MAX_MESSAGE_BYTES = 64 << 20
"""Maximum size of a message in bytes. Tensors are sent in frames, but the state of a job in one
message: about 200 bytes per tensor, 500 per ended loop, 400 per former worker. The limit allows
some 100 000 of each, and bounds the memory for one call of an unknown peer.
"""

Option = tuple[str, int]

_BOTH: tuple[Option, ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # error details list the differences between two models: more than the default of 8 KiB
    ("grpc.max_metadata_size", 64 << 10),
    ("grpc.absolute_max_metadata_size", 128 << 10),
    # ping a peer after a second without data
    ("grpc.keepalive_time_ms", 1_000),
    ("grpc.keepalive_timeout_ms", 2_200),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

PROMPT: Option = ("grpc.http2.ping_timeout_ms", 2_200)
"""Ping timeout for small messages: a lost peer is detected within 3.2 s."""

PATIENT: Option = ("grpc.http2.ping_timeout_ms", 10_000)
"""Ping timeout for tensors over at least 2 Mbit/s, and for servers, which serve both kinds of
connections.
"""

CLIENT_OPTIONS: tuple[Option, ...] = (
    *_BOTH,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_500),
    ("grpc.max_reconnect_backoff_ms", 250),
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    # the client repeats calls itself: it knows which of them are safe to repeat
    ("grpc.enable_retries", 0),
    # servers are in the local network: ignore the web proxy of the environment
    ("grpc.enable_http_proxy", 0),
    # one TCP connection per channel: two clients in one process do not block each other
    ("grpc.use_local_subchannel_pool", 1),
)

SERVER_OPTIONS: tuple[Option, ...] = (
    *_BOTH,
    PATIENT,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    # drop connections without a handshake
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.http2.settings_timeout", 5_000),
    # without BDP probes, flow control windows stay small. With probes each waiting push is
    # buffered completely: 64 pushes of 4 MB took 610 MB instead of 160 MB, while a push of 100 MB
    # took 3 % less time
    ("grpc.http2.bdp_probe", 0),
)


_users: set[int] = set()


class Endpoint(NamedTuple):
    """What a process connects to, or listens on.

    Attributes:
        address: HOST:PORT, or the path of a Unix socket.
        chosen: Credentials; None: those of the process.
    """

    address: str
    chosen: Credentials | None = None

    @property
    def credentials(self) -> Credentials:
        return process_credentials() if self.chosen is None else self.chosen

    @property
    def is_path(self) -> bool:
        return self.address.startswith("/")

    @property
    def host(self) -> str:
        """The host without the brackets of an IPv6 address."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def with_port(self, port: int) -> str:
        """Return the address with another port."""
        return f"{self.address.rpartition(':')[0]}:{port}"


def open_channel(endpoint: Endpoint, tensors: bool = False) -> grpc.Channel:
    """Return a gRPC channel, which connects at its first use.

    tensors: Use the longer ping timeout for transfers of tensors.

    Raises:
        InvalidRequestError: The process is a fork of one that used gRPC.
    """
    _users.add(os.getpid())
    if len(_users) > 1:
        raise InvalidRequestError(
            "gRPC does not work in a fork of a process that used it. Try: start this process with "
            "multiprocessing's spawn or forkserver, or connect in the children only"
        )
    options = (*CLIENT_OPTIONS, PATIENT if tensors else PROMPT)
    tls = endpoint.credentials.tls
    if tls is None:
        _check_plain(endpoint)
        return grpc.insecure_channel(endpoint.address, options=options)
    named = (*options, ("grpc.ssl_target_name_override", SERVER_NAME))
    # the channel keeps this certificate for all its connections
    used = tls.material
    certificates = grpc.ssl_channel_credentials(used.ca, used.key, used.cert)
    return grpc.secure_channel(endpoint.address, certificates, options=named)


def open_stream(endpoint: Endpoint, seconds: float) -> AnySocket:
    """Return a connected blocking socket. Raises OSError, an ssl.SSLError among them.

    seconds: Time for all addresses of the host, each one has its share, and for TLS.
    """
    if endpoint.is_path:
        return _connect_path(endpoint.address, seconds)
    deadline = time.monotonic() + seconds
    if endpoint.credentials.tls is None:
        _check_plain(endpoint)
    found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    names = [str(address[0]) for *_, address in found]
    while True:
        name = names.pop(0)
        try:
            share = max(0.001, (deadline - time.monotonic()) / (len(names) + 1))
            sock = socket.create_connection((name, endpoint.port), share)
            break
        except OSError:
            if not names:
                raise
    sock.settimeout(None)
    _set_tcp_options(sock)
    tls = endpoint.credentials.tls
    if tls is None:
        return sock
    try:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        secured = tls.client_context().wrap_socket(sock, server_hostname=SERVER_NAME)
    except BaseException:
        sock.close()
        raise
    return TlsSocket(secured)


def listen_grpc(
    endpoint: Endpoint,
    calls: int,
    handlers: Sequence[grpc.GenericRpcHandler] = (),
    retry_seconds: float = 0.0,
) -> tuple[grpc.Server, str]:
    """Create a gRPC server that has its port and is not started yet.

    Args:
        calls: Concurrent calls.
        retry_seconds: Time to wait for a port that another process still uses.

    Returns:
        The server and its HOST:PORT.

    Raises:
        TakenError: The port or the address is not available.
    """
    deadline = time.monotonic() + retry_seconds
    while True:
        server = grpc.server(
            ThreadPoolExecutor(calls, thread_name_prefix="call"),
            handlers=list(handlers),
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=calls,
        )
        try:
            tls = endpoint.credentials.tls
            port = (
                server.add_insecure_port(endpoint.address)
                if tls is None
                else server.add_secure_port(endpoint.address, _server_credentials(tls))
            )
            return server, endpoint.with_port(port)
        except RuntimeError as error:
            if time.monotonic() >= deadline:
                raise TakenError(
                    f"cannot listen on {endpoint.address}: another process has the port, or the "
                    "address belongs to another machine. Try: another `--bind` (port 0 picks a "
                    "free port)"
                ) from error
        time.sleep(RETRY_PAUSE_SECONDS)


def listen(endpoint: Endpoint) -> socket.socket:
    """Return a listening socket; only this user can connect to a path. Raises OSError."""
    address: Any = endpoint.address
    if endpoint.is_path:
        sock = socket.socket(socket.AF_UNIX)
    else:
        found = socket.getaddrinfo(
            endpoint.host, endpoint.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        # a name of both families is its IPv4 address
        family, kind, protocol, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
        sock = socket.socket(family, kind, protocol)
    try:
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(address)
        if endpoint.is_path:
            Path(endpoint.address).chmod(0o600)
        sock.listen(BACKLOG_COUNT)
    except BaseException:
        sock.close()
        raise
    return sock


def listen_http(endpoint: Endpoint) -> socket.socket:
    """Return a listening socket for metrics.

    Raises:
        TakenError: Another process has the port.
        InvalidRequestError: The address does not belong to this machine.
    """
    try:
        return listen(endpoint)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise TakenError(
                f"cannot serve metrics on {endpoint.address}: the port is taken. Try: another port "
                "(0: any free port), or stop the process that uses it"
            ) from error
        raise InvalidRequestError(
            f"cannot serve metrics on {endpoint.address}: {error.strerror or error}"
        ) from error


def accept(listening: socket.socket, tls: Tls | None) -> AnySocket:
    """Accept a connection and return its non-blocking socket; its TLS handshake is still to be
    made.

    tls: Certificates for connections over TCP; None: plain text.

    Raises:
        PermissionError: The peer at a Unix socket runs as another user.
        OSError: There is no connection, or none is possible.
    """
    sock, _ = listening.accept()
    sock.setblocking(False)
    try:
        if sock.family == socket.AF_UNIX:
            if _uid_of(sock) != os.geteuid():
                raise PermissionError("the peer runs as another user")
            return sock
        _set_tcp_options(sock)
        if tls is None:
            return sock
        secured = tls.server_context().wrap_socket(
            sock, server_side=True, do_handshake_on_connect=False
        )
    except BaseException:
        sock.close()
        raise
    return TlsSocket(secured)


def timeout_option(seconds: float) -> bytes:
    """Return the value of a socket option. The kernel takes zero for no limit."""
    return struct.pack("ll", *divmod(max(1, round(seconds * 1e6)), 1_000_000))


def _check_plain(endpoint: Endpoint) -> None:
    """Raise InvalidRequestError if a token would leave this machine in plain text."""
    own = endpoint.credentials
    if own.tokens is not None and not own.is_insecure and not is_loopback(endpoint.address):
        raise InvalidRequestError(
            f"cannot connect to {endpoint.address} without TLS: the token would be sent in plain "
            "text. Try: `--tls-ca`, `--tls-cert` and `--tls-key`, or `--insecure`"
        )


def _server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Return what a gRPC server needs; each handshake takes the newest files."""

    def certificates() -> grpc.ServerCertificateConfiguration:
        found = tls.material
        return grpc.ssl_server_certificate_configuration([(found.key, found.cert)], found.ca)

    used = tls.generation

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        # asked first: another thread may find new files meanwhile, and the next handshake has them
        generation = tls.refreshed_generation()
        if generation == used:
            return None
        used = generation
        return certificates()

    changed: Any = fetch  # the stubs lack None: nothing has changed
    return grpc.dynamic_ssl_server_credentials(
        certificates(), changed, require_client_authentication=True
    )


def _connect_path(path: str, seconds: float) -> socket.socket:
    """A server that accepts no connection lets `connect` wait, as long as a send may."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout_option(seconds))
        sock.connect(path)
    except OSError:
        sock.close()
        raise
    return sock


def _set_tcp_options(sock: socket.socket) -> None:
    """Send small frames at once, and end the connection to a peer that is gone within 4 s."""
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_USER_TIMEOUT, round(SILENCE_SECONDS * 1000)),
        (socket.TCP_KEEPIDLE, 1),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, 3),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _uid_of(sock: socket.socket) -> int:
    """Return the user id of a Unix socket's peer."""
    size = struct.calcsize("3i")
    return int(struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1])
