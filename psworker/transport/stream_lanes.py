"""Which server a worker reaches over a stream, and the open streams.

A stream is opened at the first exchange with a server: over its Unix socket if the worker finds the
path on its own host, else over TCP. The server has CONNECT_SECONDS for it. While it is not
possible, gRPC carries the exchanges, and the next attempt follows after RETRY_SECONDS.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from pscommon.core.errors import InvalidRequestError, PSError, UnreachableError
from pscommon.core.formats import spoken_format
from pscommon.settings.values import Lanes
from pscommon.telemetry.logs import get_logger
from pscommon.wire.blocking_stream import CONNECT_SECONDS, stream_addresses
from psproto.v1 import parameter_server_pb2 as ps
from psproto.v1 import stream_pb2
from psworker.transport.request_streams import RETRY_SECONDS, RequestStreams
from psworker.transport.stream_connection import StreamConnection

log = get_logger(__name__)

Describe = Callable[[ps.DescribeRequest, float], ps.DescribeResponse]


class StreamLanes:
    """The streams of one worker, by the gRPC address of the server. Thread-safe.

    lanes: the transports that the worker may use.
    """

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._lock = threading.Lock()
        self._streams: dict[str, StreamConnection] = {}
        self._requests = RequestStreams()
        self._retry_at: dict[str, float] = {}
        self._reached: dict[int, str] = {}  # how each shard is reached
        self._problems: dict[int, str] = {}  # why a shard is not reached over a stream

    def find(
        self,
        shard: int,
        address: str,
        header: ps.PushPullHeader,
        describe: Describe,
        timeout: float,
    ) -> StreamConnection | None:
        """Return an open stream to a server; None: use gRPC.

        Args:
            shard: The server's shard.
            address: Its gRPC address.
            header: Header of the request, with job, worker and term.
            describe: Asks the server for its description.
            timeout: Deadline of the exchange in seconds.

        Raises:
            UnreachableError: The server does not answer, or --lanes stream and its port does not.
            InvalidRequestError: --lanes stream, and the server has no stream port.
            MismatchError: --lanes stream, and the port belongs to another job or shard.
        """
        stream = self._streams.get(address)
        if stream is not None and not stream.is_broken and stream.hello.worker == header.worker:
            return stream
        if self._lanes == "grpc" or not header.worker:
            return None
        if time.monotonic() < self._retry_at.get(address, 0.0):
            return None
        self._close_exchanges(address)
        seconds = min(CONNECT_SECONDS, timeout)
        deadline = time.monotonic() + seconds
        description = describe(ps.DescribeRequest(), seconds)
        try:
            stream = self._open(shard, address, header, description, deadline)
        except PSError as error:
            self._requests.drop(address)
            if self._lanes == "stream":
                raise
            self._retry_at[address] = time.monotonic() + RETRY_SECONDS
            self._note(shard, len(description.addresses), "grpc", str(error))
            return None
        with self._lock:
            self._streams[address] = stream
        self._retry_at.pop(address, None)
        kind = "unix" if stream.address.startswith("/") else "tcp"
        self._note(shard, len(description.addresses), kind, "")
        return stream

    @contextmanager
    def for_requests(self, address: str) -> Iterator[StreamConnection | None]:
        """Yield a stream for one request to shard 0; None: use gRPC.

        There is one while exchanges with shard 0 use a stream.
        """
        exchanges = self._streams.get(address)
        if exchanges is None or exchanges.is_broken:
            yield None
            return
        with self._requests.borrowed(exchanges, address) as stream:
            yield stream

    def _open(
        self,
        shard: int,
        address: str,
        header: ps.PushPullHeader,
        description: ps.DescribeResponse,
        deadline: float,
    ) -> StreamConnection:
        hello = stream_pb2.StreamHello(
            format=spoken_format(),
            job=header.job,
            shard=shard,
            worker=header.worker,
            term=header.term,
        )
        server = f"shard {shard} at {address}"
        found = stream_addresses(description, address, self._lanes)
        if not found and self._lanes == "shm":
            raise UnreachableError(f"{server} is on another host")
        if not found:
            features = ", ".join(description.features)
            why = f"it offers {features}" if features else "it is of an old release"
            raise InvalidRequestError(
                f"{server} has no stream port: {why}"
                + (". Try: `--lanes auto`" if self._lanes == "stream" else "")
            )
        *others, last = found
        for other in others:
            with suppress(UnreachableError):
                share = (deadline - time.monotonic()) / len(found)
                return StreamConnection.open(other, hello, server, share)
        try:
            return StreamConnection.open(last, hello, server, deadline - time.monotonic())
        except UnreachableError as error:
            if last.startswith("/") or error.reason != "UNREACHABLE":
                raise
            remedy = "let workers reach this port (--stream-bind, --advertise-stream, firewalls)"
            if self._lanes == "stream":
                remedy += ", or `--lanes auto`"
            raise UnreachableError(f"{error}. Try: {remedy}", error.reason) from error

    def drop(self, address: str) -> None:
        """Close all streams to a server; what they do ends as if the server did not answer."""
        self._close_exchanges(address)
        self._requests.drop(address)

    def _close_exchanges(self, address: str) -> None:
        with self._lock:
            stream = self._streams.pop(address, None)
        if stream is not None:
            stream.cancel()
            stream.close()

    def drop_all(self) -> None:
        """Close all streams."""
        for address in list(self._streams):
            self._close_exchanges(address)
        self._requests.drop()

    def drop_inherited(self) -> None:
        """In a forked child: close the parent's sockets here; the parent keeps using them."""
        self._lock = threading.Lock()
        for stream in self._streams.values():
            stream.close()
        self._streams = {}
        self._requests.drop_inherited()

    def _note(self, shard: int, shards: int, kind: str, problem: str) -> None:
        """Log how the shards are reached, once all are known and after each change."""
        with self._lock:
            before, self._reached[shard] = self._reached.get(shard), kind
            self._problems[shard] = problem
            if before == kind or len(self._reached) < shards:
                return
            reached = {
                name: sorted(each for each, used in self._reached.items() if used == name)
                for name in ("unix", "tcp", "grpc")
            }
            reason = "; ".join(filter(None, self._problems.values()))
        log.info(
            "lanes_chosen",
            lanes=self._lanes,
            **{name: found for name, found in reached.items() if found},
            **({"reason": reason} if reason else {}),
        )
