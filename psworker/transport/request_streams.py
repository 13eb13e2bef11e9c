"""A worker's streams for requests to shard 0, one request at a time on each."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pscommon.core.errors import PSError
from pscommon.telemetry.logs import get_logger
from psproto.v1 import stream_pb2
from psworker.transport.stream_connection import StreamConnection

RETRY_SECONDS = 30.0
"""Time until a stream is tried again where it was not possible."""

log = get_logger(__name__)


class RequestStreams:
    """Opens as many as there are requests at a time, and uses them again. Thread-safe.

    Servers are named by their gRPC addresses.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[StreamConnection, str] = {}  # the server of each
        self._idle: list[StreamConnection] = []  # those of them that are not in use
        self._retry_at: dict[str, float] = {}  # by server

    @contextmanager
    def borrowed(
        self, exchanges: StreamConnection, server: str
    ) -> Iterator[StreamConnection | None]:
        """Yield a stream for one request; None if the server accepts none.

        Args:
            exchanges: The worker's stream for exchanges with the same server.
            server: The server.
        """
        stream = self._take_idle(exchanges.address, server) or self._try_open(exchanges, server)
        try:
            yield stream
        finally:
            if stream is not None:
                self._put_back(stream)

    def drop(self, server: str | None = None) -> None:
        """Close the streams to a server; their requests end as if it did not answer. None: all."""
        with self._lock:
            dropped = [each for each, owner in self._open.items() if server in (None, owner)]
            for stream in dropped:
                del self._open[stream]
            self._idle = [each for each in self._idle if each in self._open]
        for stream in dropped:
            stream.cancel()
            stream.close()

    def drop_inherited(self) -> None:
        """In a forked child: close the parent's sockets here; the parent keeps using them."""
        self._lock = threading.Lock()
        for stream in self._open:
            stream.close()
        self._open, self._idle = {}, []

    def _take_idle(self, address: str, server: str) -> StreamConnection | None:
        """Return an idle stream to this address; close those to earlier ones of the server."""
        with self._lock:
            own = [each for each in self._idle if self._open[each] == server]
            found = next((each for each in own if each.address == address), None)
            old = [each for each in own if each.address != address]
            for stream in old:
                del self._open[stream]
            self._idle = [each for each in self._idle if each is not found and each not in old]
        for stream in old:
            stream.close()
        return found

    def _put_back(self, stream: StreamConnection) -> None:
        with self._lock:
            if not stream.is_broken and stream in self._open:
                self._idle.append(stream)
                return
            self._open.pop(stream, None)
        stream.close()

    def _try_open(self, exchanges: StreamConnection, server: str) -> StreamConnection | None:
        if time.monotonic() < self._retry_at.get(server, 0.0):
            return None
        hello = stream_pb2.StreamHello()
        hello.CopyFrom(exchanges.hello)
        hello.purpose = stream_pb2.StreamHello.PURPOSE_REQUESTS
        try:
            stream = StreamConnection.open(exchanges.address, hello, f"shard 0 at {server}")
        except PSError as error:
            log.info("requests_without_stream", problem=str(error))
            self._retry_at[server] = time.monotonic() + RETRY_SECONDS
            return None
        with self._lock:
            self._open[stream] = server
        return stream
