"""The stream port and the Unix socket of one server process, and the threads that serve them."""

import errno
import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pscommon.core.errors import PSError, TakenError
from pscommon.security.credentials import process_credentials
from pscommon.system.thread_team import cores
from pscommon.telemetry.logs import get_logger
from pscommon.wire.endpoint import Endpoint, accept, listen, open_stream
from psserver.process.config import ServerConfig
from psserver.sockets.event_loop import MAX_LOOPS_COUNT, EventLoopThread, Serve
from psserver.sockets.worker_connection import OpenConnections, log_refusal, refuse_connection

FOLDER = Path("/dev/shm")
"""Folder of Unix sockets. Containers that share it reach each other without the network."""

LAST_PORT = 65535
STARTING_SECONDS = 5.0
"""Age from which a Unix socket that refuses connections belongs to a server that was killed."""

PROBE_SECONDS = 1.0
"""Time to connect to a Unix socket of another server."""

ACCEPT_PAUSE_SECONDS = 1.0
"""Time without new connections after the limit of open files was reached."""

log = get_logger(__name__)


class SocketPort:
    """Listens from `open_port` to `close`, and serves connections between `start` and `stop`.

    Attributes:
        address: HOST:PORT of the port; empty without one.
        advertised: Its address for workers.
        path: Path of the Unix socket; empty without one.
        streams: The open streams.
    """

    def __init__(self) -> None:
        self.streams = OpenConnections()
        self.address = self.advertised = self.path = ""
        self._serve: Serve | None = None
        self._listening: list[socket.socket] = []
        self._threads: list[EventLoopThread] = []
        self._accepted = 0
        self._tls = process_credentials().tls

    def open_port(self, bind: str, is_requested: bool) -> None:
        """Listen on HOST:PORT.

        is_requested: the user has named the port, so no other one will do.

        Raises TakenError if the port is not available.
        """
        endpoint = Endpoint(bind)
        try:
            sock = listen(endpoint)
        except OSError as error:
            if is_requested:
                raise TakenError(
                    f"cannot listen on {bind} for streams: {error.strerror or error}. Try: another "
                    "`--stream-bind` (port 0 picks a free port)"
                ) from error
            sock = listen(Endpoint(endpoint.with_port(0)))
        self._listening.append(sock)
        self.address = endpoint.with_port(sock.getsockname()[1])

    def open_path(self) -> None:
        """Listen on a Unix socket, if the host has a folder for it."""
        remove_dead_paths()
        path = str(FOLDER / f"paramserver-{secrets.token_hex(8)}.sock")
        try:
            self._listening.append(listen(Endpoint(path)))
        except OSError as error:
            log.info("unix_socket_unavailable", problem=str(error))
            return
        self.path = path

    def start(self, serve: Serve) -> None:
        """Begin to serve connections."""
        self._serve = serve
        if self._listening:
            self._threads = [EventLoopThread(n) for n in range(min(cores(), MAX_LOOPS_COUNT))]
        for thread in self._threads:
            thread.start()
        for sock in self._listening:
            sock.setblocking(False)
            self._watch(sock)

    def refuse_all(self, make_error: Callable[[], PSError]) -> None:
        """Begin to answer each greeting with an error."""
        self.start(lambda sock: refuse_connection(sock, make_error(), self.streams))

    def stop(self) -> None:
        """End all streams and threads. The port stays open: new connections wait for `start`."""
        if self._threads:
            self._threads[0].loop.call_soon_threadsafe(self._stop_accepting)
        for thread in self._threads:
            thread.end()
        self._threads = []

    def close(self) -> None:
        """Close the port and all streams. Repeating it is harmless."""
        if self.path:
            Path(self.path).unlink(missing_ok=True)
        self.stop()
        for sock in self._listening:
            sock.close()

    def _watch(self, sock: socket.socket) -> None:
        loop = self._threads[0].loop
        loop.call_soon_threadsafe(loop.add_reader, sock.fileno(), self._accept, sock)

    def _stop_accepting(self) -> None:
        for sock in self._listening:
            self._threads[0].loop.remove_reader(sock.fileno())

    def _accept(self, listening: socket.socket) -> None:
        """Accept one connection; runs in the first event loop."""
        try:
            sock = accept(listening, self._tls)
        except PermissionError as error:
            log_refusal(str(error))
            return
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                log.warning(
                    "connections_refused",
                    limited=True,
                    problem=error.strerror,
                    remedy="raise the limit of open files (ulimit -n)",
                )
                loop = self._threads[0].loop
                loop.remove_reader(listening.fileno())
                loop.call_later(ACCEPT_PAUSE_SECONDS, self._watch, listening)
            return
        self._accepted += 1
        assert self._serve is not None
        self._threads[self._accepted % len(self._threads)].add(sock, self._serve)


def open_socket_port(config: ServerConfig, address: str) -> SocketPort:
    """Open the port and the Unix socket as far as --lanes allows.

    Args:
        address: HOST:PORT of the server's gRPC port.

    Raises TakenError if a requested port is not available.
    """
    port = SocketPort()
    if config.lanes in ("auto", "stream"):
        port.open_port(config.stream_bind or default_bind(address), config.stream_bind is not None)
        host, _, number = port.address.rpartition(":")
        if config.advertise is not None:
            host = config.advertise.rpartition(":")[0]
        port.advertised = config.advertise_stream or f"{host}:{number}"
    if config.lanes in ("auto", "shm"):
        port.open_path()
    return port


def default_bind(address: str) -> str:
    """Return the address of the stream port: 1000 above the gRPC port, or any free port."""
    host, _, port = address.rpartition(":")
    number = int(port) + 1000
    return f"{host}:{number if number <= LAST_PORT else 0}"


def remove_dead_paths() -> None:
    """Remove this user's Unix sockets whose servers were killed.

    A socket also refuses connections before its server listens.
    """
    for path in FOLDER.glob("paramserver-*.sock"):
        with suppress(OSError):
            facts = path.stat()
            if facts.st_uid != os.geteuid() or time.time() - facts.st_ctime < STARTING_SECONDS:
                continue
            try:
                open_stream(Endpoint(str(path)), PROBE_SECONDS).close()
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
