"""A worker's requests over the network: gRPC channels to all servers, and calls on them.

Exchanges and requests use a socket instead where there is one (socket_pool.py).
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import grpc

from pscommon.core.errors import InvalidRequestError, PSError, UnreachableError
from pscommon.core.formats import check_wire_format
from pscommon.security.credentials import process_credentials
from pscommon.settings.values import Lanes
from pscommon.system import signals as interruptible
from pscommon.wire.frames import Frame
from pscommon.wire.requests import (
    DESCRIBE,
    EXCHANGE,
    INTRODUCE,
    JOIN,
    STREAM_FIELDS,
    A,
    AnyRequest,
    Q,
    Request,
)
from pscommon.wire.status import error_from, translated
from pscommon.wire.tls_probe import cause_of
from psproto.v1 import parameter_server_pb2 as ps
from psworker.core.clock import Clock
from psworker.transport.exchange_calls import (
    AnswerReceiver,
    Cancellation,
    ExchangeAnswer,
)
from psworker.transport.grpc_exchanges import ServerChannel, TransferCall, grpc_exchange
from psworker.transport.server_addresses import ServerAddresses
from psworker.transport.socket_pool import SocketPool

INTRODUCTION_SECONDS = 5.0
CLOSED = "Socket closed"
"""What gRPC says of a connection that its server has ended."""


class GrpcTransport:
    """The gRPC transport. Channels open when they are first used.

    Requests to the coordinator have their own channel, so heartbeats do not queue behind
    gradients. A forked child does not use the channels of its parent.

    Args:
        addresses: Server addresses by shard.
        given: Addresses that the user listed, perhaps with those of standbys.
        lanes: The transports of exchanges: sockets where they are allowed and possible.
    """

    direct = False

    def __init__(
        self, addresses: Sequence[str], given: Sequence[str] = (), lanes: Lanes = "grpc"
    ) -> None:
        self.clock = Clock(time.monotonic, time.sleep)
        self._servers = ServerAddresses(addresses, given)
        self._lock = threading.Lock()
        self._channels: dict[tuple[str, bool], ServerChannel] = {}
        self._open_calls: set[TransferCall] = set()
        self._keys: dict[int, bytes] = {}  # of the workers as which this process has joined
        self._sockets = SocketPool(lanes, self._keys)
        self._introductions: list[object] = []  # keeps the futures alive, so their calls go on
        self._is_closed = False
        _transports.add(self)

    @property
    def addresses(self) -> Sequence[str]:
        return self._servers.addresses

    def learn(
        self, job: str, addresses: Sequence[str], terms: Sequence[int], standbys: Sequence[str]
    ) -> None:
        if any(0 < term < self._servers.terms[0] for term in terms[:1]):
            return  # a late answer of a former primary of shard 0
        if not self._servers.count(len(addresses)):
            return  # the next exchange raises LayoutError and finds the servers
        void: set[str] = set()
        for shard, known in enumerate(zip(addresses, terms, standbys, strict=False)):
            void |= self._servers.learn_from_shard_0(shard, *known)
        self._close_channels(void)
        # Not strict: another thread may change the number of addresses.
        first, *others = zip(self.addresses, addresses, strict=False)
        uninformed = [address for address, known in others if not known]
        self._introductions = [self._introduce(address, job, first[0]) for address in uninformed]

    def _introduce(self, address: str, job: str, coordinator: str) -> object:
        """Send a shard the address of shard 0 without waiting; the next `learn` retries."""
        request = ps.IntroduceRequest(coordinator=coordinator, job=job)
        with suppress(ValueError, InvalidRequestError), interruptible.deferred(lambda _: None):
            # ValueError or InvalidRequestError: another thread has closed the channel.
            return (
                self._channel(address)
                .stubs[INTRODUCE]
                .future(request, timeout=INTRODUCTION_SECONDS)
            )
        return None

    def _close_channels(self, addresses: set[str]) -> None:
        """Close the channels to former primaries; their calls end and are retried elsewhere."""
        with self._lock:
            channels = [
                self._channels.pop(key) for key in list(self._channels) if key[0] in addresses
            ]
        for channel in channels:
            channel.cancel()
        for address in addresses:
            self._sockets.drop(address)

    def find_primaries(self, job: str, timeout: float) -> bool:
        servers, calls, void = self._servers, [], set[str]()
        for address in servers.known_addresses:
            describe = self._channel(address).stubs[DESCRIBE]
            # gRPC raises ValueError if another thread has closed the channel.
            with suppress(ValueError):
                calls.append((address, describe.future(ps.DescribeRequest(), timeout=timeout)))
        for address, call in calls:
            with suppress(PSError), translated(address):
                found = call.result()
                check_wire_format(found.format, address, "this worker")
                if found.job == job and found.shard < len(self.addresses):
                    void |= servers.learn(found.shard, address, found.term)
        self._close_channels(void)
        return bool(void)

    def answers(self, timeout: float) -> bool:
        calls = []
        with suppress(ValueError, InvalidRequestError):  # another thread has closed the channel
            for address in self.addresses:
                describe = self._channel(address).stubs[DESCRIBE]
                calls.append((address, describe.future(ps.DescribeRequest(), timeout=timeout)))
        for address, call in calls:
            try:
                with suppress(grpc.FutureCancelledError), translated(address):
                    call.result()
            except UnreachableError:
                return False
            except PSError:  # an error is an answer too
                continue
        return True

    def end_calls(self) -> None:
        with self._lock:
            channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            channel.cancel()
        self._sockets.drop_all()

    def request(self, row: Request[Q, A], message: Q, timeout: float, shard: int = 0) -> A:
        with self._at(shard, row) as channel:
            if row in STREAM_FIELDS:
                with self._sockets.for_requests(channel.address, message) as connection:
                    if connection is not None:
                        with interruptible.deferred(lambda _: connection.cancel()):
                            return connection.request(row, message, timeout)
            with interruptible.deferred(channel.cancel):
                worker = message.worker if row.names_sender else 0  # type: ignore[attr-defined]
                answer: A = channel.stubs[row](message, timeout, self._keys.get(worker, b""))
                if row is JOIN:
                    self._keys[answer.worker] = answer.key  # type: ignore[attr-defined]
                return answer

    def relocate(self, addresses: Sequence[str]) -> bool:
        self._servers.count(len(addresses))
        if not all(addresses) or list(addresses) == list(self.addresses):
            return False
        self._close_channels(self._servers.relocate(addresses))
        return True

    def exchange(
        self,
        shard: int,
        header: ps.PushPullHeader,
        send: Sequence[memoryview],
        receiver: AnswerReceiver,
        timeout: float,
        cancellation: Cancellation,
        frames: Iterator[Frame[ps.PushPullHeader]] | None = None,
    ) -> ExchangeAnswer:
        self._servers.check_shard_count()
        header.term = self._servers.terms[shard]
        with self._at(shard, EXCHANGE) as channel:
            describe = channel.stubs[DESCRIBE]
            connection = self._sockets.find(shard, channel.address, header, describe, timeout)
            if connection is None:
                answer = grpc_exchange(
                    channel,
                    header,
                    send,
                    receiver,
                    timeout,
                    cancellation,
                    frames,
                    self._open_calls,
                )
            else:
                cancellation.attach(connection)
                try:
                    answer = connection.exchange(header, send, receiver, timeout, frames)
                finally:
                    cancellation.detach(connection)
            self._servers.check(shard, answer.result.term)
            return answer

    def offer_memory(
        self, shard: int, header: ps.PushPullHeader, share: Callable[[], int], timeout: float
    ) -> None:
        header.term = self._servers.terms[shard]
        with self._at(shard, EXCHANGE) as channel:
            describe = channel.stubs[DESCRIBE]
            with interruptible.deferred(channel.cancel):
                connection = self._sockets.find_path(
                    shard, channel.address, header, describe, timeout
                )
            descriptor = share()
            with interruptible.deferred(lambda _: connection.cancel()):
                connection.offer_memory(header, descriptor, timeout)

    def end_stalled(self) -> None:
        for call in list(self._open_calls):
            call.end_if_stalled()

    def worker_key(self, worker: int) -> bytes:
        return self._keys.get(worker, b"")

    def close(self) -> None:
        """Close all channels. May be called again, and in a forked child."""
        self._is_closed = True
        self.end_calls()

    @contextmanager
    def _at(self, shard: int, row: AnyRequest) -> Iterator[ServerChannel]:
        """Yield the channel to a shard's server; after a failure the next call uses the other."""
        address = self._servers.addresses[shard]
        channel = self._channel(address, tensors=row.service == EXCHANGE.service)
        try:
            yield channel
        except (grpc.RpcError, UnreachableError) as failure:
            error: PSError | grpc.RpcError = failure
            if isinstance(failure, grpc.RpcError):
                error = error_from(failure, f"shard {shard} at {address} ({row.name})")
                error = _with_tls(error, channel)
            if (
                isinstance(error, UnreachableError)
                and error.reason in ("UNREACHABLE", "NOT_PRIMARY")
                and not channel.is_closed
            ):
                self._servers.switch(shard, address)
            if error is failure:
                raise
            raise error from failure
        except ValueError as closed:
            # gRPC raises ValueError on a closed channel: the server is no longer primary, or
            # another thread has cancelled a call on it.
            if self._is_closed or not channel.is_closed:
                raise
            raise UnreachableError(
                f"the channel to shard {shard} at {address} was closed", "NOT_PRIMARY"
            ) from closed

    def _channel(self, address: str, tensors: bool = False) -> "ServerChannel":
        with self._lock:
            if self._is_closed:
                raise InvalidRequestError("this Client is closed")
            channel = self._channels.get((address, tensors))
            if channel is None or channel.is_closed:
                channel = self._channels[address, tensors] = ServerChannel(
                    address, tensors, self._keys
                )
            return channel

    def drop_inherited_channels(self) -> None:
        """In a forked child: drop the parent's channels without closing them, which could hang."""
        _inherited.extend(self._channels.values())
        self._lock, self._channels = threading.Lock(), {}
        self._sockets.drop_inherited()


def _with_tls(error: PSError, channel: ServerChannel) -> PSError:
    """Return the error of a call, with the cause if TLS has failed.

    The server accepted this process before: an operator may correct its files meanwhile. Without
    TLS here, a server that now uses it closes the connection; one that is silent is not asked.
    """
    tls = process_credentials().tls
    if not isinstance(error, UnreachableError) or (tls is None and CLOSED not in str(error)):
        return error
    cause = cause_of(error, channel.address)
    if tls is not None:
        channel.close_if_outdated(tls)
    return error if cause is error else UnreachableError(f"{error}: {cause}", error.reason)


_transports: "weakref.WeakSet[GrpcTransport]" = weakref.WeakSet()
_inherited: list[Any] = []


def _after_fork() -> None:
    for transport in list(_transports):
        transport.drop_inherited_channels()


os.register_at_fork(after_in_child=_after_fork)
