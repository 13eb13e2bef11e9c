"""Serves the streams of workers and shards on a primary."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from pscommon.wire.tls_socket import AnySocket
from psserver.coordinator.handlers import coordinator_handlers
from psserver.coordinator.service import CoordinatorService
from psserver.process.handlers import Handlers
from psserver.process.identity import ServerIdentity
from psserver.shard.engine import ShardEngine
from psserver.sockets.event_loop import SocketService
from psserver.sockets.shard_links import ShardLinks
from psserver.sockets.socket_port import SocketPort
from psserver.sockets.worker_connection import WorkerConnection

POOL_THREADS_COUNT = 32
"""Threads for exchanges that wait for a disk, a standby or a long update."""


class SocketListener:
    """Serves the connections of a port, from `start` to `close`.

    port: closed with the listener.
    record: called with the method, the status code and the seconds of each exchange or request.
    coordinator: the coordinator, on shard 0.
    """

    def __init__(
        self,
        port: SocketPort,
        engine: ShardEngine,
        identity: ServerIdentity,
        record: Callable[[str, str, float], None],
        coordinator: CoordinatorService | None = None,
    ) -> None:
        self._port, self._identity = port, identity
        identity.stream_address, identity.stream_path = port.advertised, port.path
        engine.traffic.observers.append(port.streams)
        self._pool = ThreadPoolExecutor(POOL_THREADS_COUNT, thread_name_prefix="stream-work")
        self._service = SocketService(engine, identity, self._pool, record)
        self._handlers: Handlers | None = None
        self._links: ShardLinks | None = None
        if coordinator is not None:
            self._handlers = coordinator_handlers(coordinator)
            self._links = ShardLinks(coordinator)

    def start(self) -> None:
        """Begin to serve workers."""
        self._port.start(self._serve)

    def close(self) -> None:
        """Close the port and all streams. Repeating it is harmless."""
        self._port.close()
        if self._links is not None:
            self._links.close()
        self._pool.shutdown()

    def _serve(self, sock: AnySocket) -> tuple["asyncio.Task[None]", Callable[[], None]]:
        stream = WorkerConnection(
            sock,
            self._identity,
            self._service,
            self._port.streams,
            self._handlers,
            self._links,
        )
        return stream.task, stream.keep_alive
