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
    """Opens as many as there are requests at a time, and uses them again. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[StreamConnection] = []
        self._idle: list[StreamConnection] = []  # those of them that are not in use
        self._retry_at: dict[str, float] = {}  # by address

    @contextmanager
    def borrowed(
        self, exchanges: StreamConnection, server: str
    ) -> Iterator[StreamConnection | None]:
        """Yield a stream for one request; None if the server accepts none.

        Args:
            exchanges: The worker's stream for exchanges with the same server.
            server: Names the server in errors.
        """
        stream = self._take_idle(exchanges.address) or self._try_open(exchanges, server)
        try:
            yield stream
        finally:
            if stream is not None:
                self._put_back(stream)

    def drop(self, address: str) -> None:
        """Close the streams to this address; their requests end as if the server did not answer."""
        with self._lock:
            dropped = [each for each in self._open if each.address == address]
            self._open = [each for each in self._open if each not in dropped]
            self._idle = [each for each in self._idle if each not in dropped]
        for stream in dropped:
            stream.cancel()
            stream.close()

    def drop_inherited(self) -> None:
        """In a forked child: close the parent's sockets here; the parent keeps using them."""
        self._lock = threading.Lock()
        for stream in self._open:
            stream.close()
        self._open, self._idle = [], []

    def _take_idle(self, address: str) -> StreamConnection | None:
        with self._lock:
            found = next((each for each in self._idle if each.address == address), None)
            if found is not None:
                self._idle.remove(found)
            return found

    def _put_back(self, stream: StreamConnection) -> None:
        with self._lock:
            if not stream.is_broken:
                self._idle.append(stream)
                return
            self._open = [each for each in self._open if each is not stream]
        stream.close()

    def _try_open(self, exchanges: StreamConnection, server: str) -> StreamConnection | None:
        if time.monotonic() < self._retry_at.get(exchanges.address, 0.0):
            return None
        hello = stream_pb2.StreamHello()
        hello.CopyFrom(exchanges.hello)
        hello.purpose = stream_pb2.StreamHello.PURPOSE_REQUESTS
        try:
            stream = StreamConnection.open(exchanges.address, hello, server)
        except PSError as error:
            log.info("requests_without_stream", problem=str(error))
            self._retry_at[exchanges.address] = time.monotonic() + RETRY_SECONDS
            return None
        with self._lock:
            self._open.append(stream)
        return stream
