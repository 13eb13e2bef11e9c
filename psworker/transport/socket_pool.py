"""A worker's sockets to servers, which carry exchanges and requests in place of gRPC.

A connection is opened at the first exchange with a server: over its Unix socket if the worker finds
the path on its own host, else over TCP. The server has CONNECT_SECONDS for it. While it is not
possible, gRPC carries the exchanges, and the next attempt follows after RETRY_SECONDS.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pscommon.core.errors import InvalidRequestError, PSError, UnreachableError
from pscommon.core.formats import spoken_format
from pscommon.settings.values import Lanes
from pscommon.telemetry.logs import get_logger
from pscommon.wire.blocking_socket import CONNECT_SECONDS, socket_addresses
from psproto.v1 import parameter_server_pb2 as ps
from psproto.v1 import stream_pb2
from psworker.transport.socket_connection import SocketConnection

RETRY_SECONDS = 30.0
"""Time until a socket is tried again where it was not possible."""

log = get_logger(__name__)

Describe = Callable[[ps.DescribeRequest, float], ps.DescribeResponse]


class SocketPool:
    """The socket connections of one worker, by the gRPC address of the server. Thread-safe.

    lanes: The transports that the worker may use.
    keys: The keys of this process's workers by number.
    """

    def __init__(self, lanes: Lanes, keys: Mapping[int, bytes]) -> None:
        self._lanes, self._keys = lanes, keys
        self._lock = threading.Lock()
        self._connections: dict[str, SocketConnection] = {}
        self._requests = RequestSockets()
        self._retry_at: dict[str, float] = {}
        self._reached: dict[int, str] = {}  # how each shard is reached
        self._problems: dict[int, str] = {}  # why a shard is not reached over a socket
        self._no_path: dict[int, PSError] = {}  # why not over its Unix socket

    def find(
        self,
        shard: int,
        address: str,
        header: ps.PushPullHeader,
        describe: Describe,
        timeout: float,
        for_memory: bool = False,
    ) -> SocketConnection | None:
        """Return an open connection to a server; None: use gRPC.

        Args:
            shard: The server's shard.
            address: Its gRPC address.
            header: Header of the request, with job, worker and term.
            describe: Asks the server for its description.
            timeout: Deadline of the exchange in seconds.
            for_memory: Open none to a server without a Unix socket here.

        Raises:
            UnreachableError: The server does not answer, or --lanes stream and its port does not.
            InvalidRequestError: --lanes stream, and the server has no stream port; or `for_memory`,
                and there is no Unix socket here.
            MismatchError: --lanes stream, and the port belongs to another job or shard.
        """
        connection = self._connections.get(address)
        if (
            connection is not None
            and not connection.is_broken
            and connection.hello.worker == header.worker
        ):
            return connection
        if self._lanes == "grpc" or not header.worker:
            return None
        if time.monotonic() < self._retry_at.get(address, 0.0):
            return None
        self._close_exchanges(address)
        seconds = min(CONNECT_SECONDS, timeout)
        deadline = time.monotonic() + seconds
        description = describe(ps.DescribeRequest(), seconds)
        self._no_path[shard] = _missing_path(description)
        if for_memory and not socket_addresses(description, address, "shm"):
            raise self._no_path[shard]
        try:
            connection = self._open(shard, address, header, description, deadline)
        except PSError as error:
            self._requests.drop(address)
            if self._lanes == "stream":
                raise
            if not isinstance(error, UnreachableError) or error.reason == "UNREACHABLE":
                self._retry_at[address] = time.monotonic() + RETRY_SECONDS
            self._note(shard, len(description.addresses), "grpc", str(error))
            return None
        with self._lock:
            self._connections[address] = connection
        self._retry_at.pop(address, None)
        kind = "unix" if connection.address.startswith("/") else "tcp"
        self._note(shard, len(description.addresses), kind, "")
        return connection

    def find_path(
        self,
        shard: int,
        address: str,
        header: ps.PushPullHeader,
        describe: Describe,
        timeout: float,
    ) -> SocketConnection:
        """Return an open connection to a server's Unix socket; arguments as for `find`.

        Raises:
            UnreachableError: The server does not answer.
            InvalidRequestError: Its Unix socket cannot be used.
        """
        connection = self.find(shard, address, header, describe, timeout, for_memory=True)
        no_path = self._no_path.get(shard) or InvalidRequestError("this worker uses gRPC only")
        if connection is None:
            raise no_path.with_traceback(None)
        if not connection.address.startswith("/"):
            raise InvalidRequestError(str(no_path))
        return connection

    @contextmanager
    def for_requests(self, address: str, message: Any) -> Iterator[SocketConnection | None]:
        """Yield a connection for one request to shard 0; None: use gRPC.

        There is one while exchanges of the same worker with shard 0 use a connection.
        """
        exchanges = self._connections.get(address)
        if exchanges is None or exchanges.is_broken or exchanges.hello.worker != message.worker:
            yield None
            return
        with self._requests.borrowed(exchanges, address) as connection:
            yield connection

    def _open(
        self,
        shard: int,
        address: str,
        header: ps.PushPullHeader,
        description: ps.DescribeResponse,
        deadline: float,
    ) -> SocketConnection:
        hello = stream_pb2.StreamHello(
            format=spoken_format(),
            job=header.job,
            shard=shard,
            worker=header.worker,
            term=header.term,
            key=self._keys.get(header.worker, b""),
        )
        server = f"shard {shard} at {address}"
        found = socket_addresses(description, address, self._lanes)
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
            try:
                share = (deadline - time.monotonic()) / len(found)
                return SocketConnection.open(other, hello, server, share)
            except UnreachableError as error:
                self._no_path[shard] = error
        try:
            return SocketConnection.open(last, hello, server, deadline - time.monotonic())
        except UnreachableError as error:
            if last.startswith("/"):
                self._no_path[shard] = error
            if last.startswith("/") or error.reason != "UNREACHABLE":
                raise
            remedy = "let workers reach this port (--stream-bind, --advertise-stream, firewalls)"
            if self._lanes == "stream":
                remedy += ", or `--lanes auto`"
            raise UnreachableError(f"{error}. Try: {remedy}", error.reason) from error

    def drop(self, address: str) -> None:
        """Close all connections to a server; what they do ends as if the server did not answer."""
        self._close_exchanges(address)
        self._requests.drop(address)

    def _close_exchanges(self, address: str) -> None:
        with self._lock:
            connection = self._connections.pop(address, None)
        if connection is not None:
            connection.cancel()
            connection.close()

    def drop_all(self) -> None:
        """Close all connections."""
        for address in list(self._connections):
            self._close_exchanges(address)
        self._requests.drop()

    def drop_inherited(self) -> None:
        """In a forked child: close the parent's sockets here; the parent keeps using them."""
        self._lock = threading.Lock()
        for connection in self._connections.values():
            connection.close()
        self._connections = {}
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


def _missing_path(description: ps.DescribeResponse) -> InvalidRequestError:
    """Return the reason why a server's Unix socket cannot be used, unless connecting says more."""
    return InvalidRequestError(
        f"the server's Unix socket {description.stream_path} cannot be reached from here"
        if description.stream_path
        else f"the server has no Unix socket, and offers {', '.join(description.features)}"
    )


class RequestSockets:
    """Opens as many as there are requests at a time, and uses them again. Thread-safe.

    Servers are named by their gRPC addresses.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[SocketConnection, str] = {}  # the server of each
        self._idle: list[SocketConnection] = []  # those of them that are not in use
        self._retry_at: dict[str, float] = {}  # by server

    @contextmanager
    def borrowed(
        self, exchanges: SocketConnection, server: str
    ) -> Iterator[SocketConnection | None]:
        """Yield a connection for one request; None if the server accepts none.

        Args:
            exchanges: The worker's connection for exchanges with the same server.
            server: The server.
        """
        connection = self._take_idle(exchanges, server) or self._try_open(exchanges, server)
        try:
            yield connection
        finally:
            if connection is not None:
                self._put_back(connection)

    def drop(self, server: str | None = None) -> None:
        """Close the connections to a server; requests end as if it did not answer. None: all."""
        with self._lock:
            dropped = [each for each, owner in self._open.items() if server in (None, owner)]
            for connection in dropped:
                del self._open[connection]
            self._idle = [each for each in self._idle if each in self._open]
        for connection in dropped:
            connection.cancel()
            connection.close()

    def drop_inherited(self) -> None:
        """In a forked child: close the parent's sockets here; the parent keeps using them."""
        self._lock = threading.Lock()
        for connection in self._open:
            connection.close()
        self._open, self._idle = {}, []

    def _take_idle(self, exchanges: SocketConnection, server: str) -> SocketConnection | None:
        """Return an idle connection; close those to earlier addresses or of earlier memberships."""
        wanted = exchanges.address, exchanges.hello.worker
        with self._lock:
            own = [each for each in self._idle if self._open[each] == server]
            old = [each for each in own if (each.address, each.hello.worker) != wanted]
            found = next((each for each in own if each not in old), None)
            for connection in old:
                del self._open[connection]
            self._idle = [each for each in self._idle if each is not found and each not in old]
        for connection in old:
            connection.close()
        return found

    def _put_back(self, connection: SocketConnection) -> None:
        with self._lock:
            if not connection.is_broken and connection in self._open:
                self._idle.append(connection)
                return
            self._open.pop(connection, None)
        connection.close()

    def _try_open(self, exchanges: SocketConnection, server: str) -> SocketConnection | None:
        if time.monotonic() < self._retry_at.get(server, 0.0):
            return None
        hello = stream_pb2.StreamHello()
        hello.CopyFrom(exchanges.hello)
        hello.purpose = stream_pb2.StreamHello.PURPOSE_REQUESTS
        try:
            connection = SocketConnection.open(exchanges.address, hello, f"shard 0 at {server}")
        except PSError as error:
            log.info("requests_without_stream", problem=str(error))
            self._retry_at[server] = time.monotonic() + RETRY_SECONDS
            return None
        with self._lock:
            self._open[connection] = server
        return connection
