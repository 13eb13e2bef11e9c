"""The stream port and the Unix socket of one server."""

import errno
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from pscommon.core.errors import TakenError
from pscommon.system.shared_memory import FOLDER
from pscommon.system.thread_team import cores
from pscommon.telemetry.logs import get_logger
from pscommon.wire.stream_format import set_tcp_options
from psserver.coordinator.service import CoordinatorService
from psserver.process.config import ServerConfig
from psserver.process.identity import ServerIdentity
from psserver.shard.engine import ShardEngine
from psserver.stream.coordinator_requests import StreamRequests
from psserver.stream.event_loops import MAX_LOOPS_COUNT, EventLoopThread
from psserver.stream.open_streams import OpenStreams
from psserver.stream.shard_links import ShardLinks
from psserver.stream.stream_service import StreamService
from psserver.stream.worker_stream import WorkerStream
from psserver.transfer.exchange_steps import ExchangeSteps

LAST_PORT = 65535
BACKLOG_COUNT = 1024
STARTING_SECONDS = 5.0
"""Age from which a Unix socket that refuses connections belongs to a server that was killed."""
POOL_THREADS_COUNT = 32
"""Threads for exchanges that wait for a disk, a standby or a long update."""

ACCEPT_PAUSE_SECONDS = 1.0
"""Time without new connections after the limit of open files was reached."""

REFUSAL_NOTICE_SECONDS = 10.0
"""Time between log lines about refused peers."""

log = get_logger(__name__)


class StreamListener:
    """Accepts the streams of workers and serves them, from `start` to `close`.

    record: called with the method, the status code and the seconds of each exchange or request.
    coordinator: the coordinator, on shard 0.
    """

    def __init__(
        self,
        engine: ShardEngine,
        identity: ServerIdentity,
        record: Callable[[str, str, float], None],
        coordinator: CoordinatorService | None = None,
    ) -> None:
        self._identity, self._streams = identity, OpenStreams()
        engine.traffic.observers.append(self._streams)
        self._pool = ThreadPoolExecutor(POOL_THREADS_COUNT, thread_name_prefix="stream-work")
        self._service = StreamService(engine, ExchangeSteps(engine, identity), self._pool, record)
        self._requests, self._links = None, None
        if coordinator is not None:
            self._requests = StreamRequests(coordinator, self._service)
            self._links = ShardLinks(coordinator)
        self._listening: list[socket.socket] = []
        self._paths: list[Path] = []
        self._threads: list[EventLoopThread] = []
        self._accepted = 0
        self._refused, self._noticed_at = 0, -REFUSAL_NOTICE_SECONDS

    def bind(self, bind: str, is_requested: bool) -> str:
        """Open the port; return its HOST:PORT.

        is_requested: the user has named the port, so no other one will do.

        Raises TakenError if the port is not available.
        """
        try:
            sock = _listen(bind)
        except OSError as error:
            if is_requested:
                raise TakenError(
                    f"cannot listen on {bind} for streams: {error.strerror or error}. Try: another "
                    "`--stream-bind` (port 0 picks a free port)"
                ) from error
            sock = _listen(f"{bind.rpartition(':')[0]}:0")
        self._listening.append(sock)
        return f"{bind.rpartition(':')[0]}:{sock.getsockname()[1]}"

    def bind_path(self) -> str:
        """Open a Unix socket beside the files of shared memory; return its path, empty if the host
        has no such folder.
        """
        remove_dead_paths()
        path = FOLDER / f"paramserver-{secrets.token_hex(8)}.sock"
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.bind(str(path))
            path.chmod(0o600)
            sock.listen(BACKLOG_COUNT)
        except OSError as error:
            sock.close()
            log.info("unix_socket_unavailable", problem=str(error))
            return ""
        self._listening.append(sock)
        self._paths.append(path)
        return str(path)

    def start(self) -> None:
        """Begin to accept workers."""
        if self._listening:
            self._threads = [EventLoopThread(n) for n in range(min(cores(), MAX_LOOPS_COUNT))]
        for thread in self._threads:
            thread.start()
        for sock in self._listening:
            sock.setblocking(False)
            self._watch(sock)

    def close(self) -> None:
        """Close the port and all streams. Repeating it is harmless."""
        for path in self._paths:
            path.unlink(missing_ok=True)
        self._paths.clear()
        if self._threads:
            self._threads[0].loop.call_soon_threadsafe(self._stop_accepting)
        for thread in self._threads:
            thread.end()
        self._threads = []
        if self._links is not None:
            self._links.close()
        self._pool.shutdown()
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
            sock, _ = listening.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                log.warning(
                    "connections_refused",
                    problem=error.strerror,
                    remedy="raise the limit of open files (ulimit -n)",
                )
                loop = self._threads[0].loop
                loop.remove_reader(listening.fileno())
                loop.call_later(ACCEPT_PAUSE_SECONDS, self._watch, listening)
            return
        sock.setblocking(False)
        if sock.family == socket.AF_UNIX:
            if _uid_of(sock) != os.geteuid():
                self._note_refusal("the peer runs as another user")
                sock.close()
                return
        else:
            set_tcp_options(sock)
        self._accepted += 1
        self._threads[self._accepted % len(self._threads)].add(sock, self._serve)

    def _serve(self, sock: socket.socket) -> WorkerStream:
        return WorkerStream(
            sock,
            self._identity,
            self._service,
            self._streams,
            self._note_refusal,
            self._requests,
            self._links,
        )

    def _note_refusal(self, problem: str) -> None:
        """Log a refused peer, at most one in REFUSAL_NOTICE_SECONDS."""
        self._refused += 1
        now = time.monotonic()
        if now - self._noticed_at >= REFUSAL_NOTICE_SECONDS:
            log.warning("stream_refused", problem=problem, refused=self._refused)
            self._refused, self._noticed_at = 0, now


def open_streams(
    config: ServerConfig,
    engine: ShardEngine,
    identity: ServerIdentity,
    address: str,
    record: Callable[[str, str, float], None],
    coordinator: CoordinatorService | None,
) -> StreamListener:
    """Open the stream port and the Unix socket as far as --lanes allows, and tell `identity`.

    Args:
        address: HOST:PORT of the server's gRPC port.
        record: Called with the method, the status code and the seconds of each exchange or
            request.
        coordinator: The coordinator, on shard 0.

    Raises TakenError if a requested port is not available.
    """
    listener = StreamListener(engine, identity, record, coordinator)
    try:
        if config.lanes in ("auto", "stream"):
            bind = config.stream_bind or default_bind(address)
            host, _, port = listener.bind(bind, config.stream_bind is not None).rpartition(":")
            if config.advertise is not None:
                host = config.advertise.rpartition(":")[0]
            identity.stream_address = config.advertise_stream or f"{host}:{port}"
        if config.lanes in ("auto", "shm"):
            identity.stream_path = listener.bind_path()
    except BaseException:
        listener.close()
        raise
    return listener


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
        with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):
            facts = path.stat()
            if facts.st_uid != os.geteuid() or time.time() - facts.st_ctime < STARTING_SECONDS:
                continue
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)


def _listen(bind: str) -> socket.socket:
    host, _, port = bind.rpartition(":")
    family, kind, protocol, _, address = socket.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(address)
        sock.listen(BACKLOG_COUNT)
    except BaseException:
        sock.close()
        raise
    return sock


def _uid_of(sock: socket.socket) -> int:
    """Return the user id of a Unix socket's peer."""
    size = struct.calcsize("3i")
    return int(struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1])
