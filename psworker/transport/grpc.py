"""The gRPC transport of a worker's requests: channels to all servers, and calls on them."""

import itertools
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import grpc

from pscommon.core.errors import InvalidRequestError, PSError, UnreachableError
from pscommon.core.formats import check_wire_format
from pscommon.system import signals as interruptible
from pscommon.wire.channel import FRAME_BYTES, open_channel
from pscommon.wire.frames import ExchangeStub, chunks, decode_response, encode_header
from pscommon.wire.status import translated
from psproto.v1 import coordinator_pb2 as co
from psproto.v1 import parameter_server_pb2 as ps
from psproto.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from psproto.v1.parameter_server_pb2_grpc import ParameterServerServiceStub
from psworker.core.clock import Clock
from psworker.transport.endpoints import Endpoints
from psworker.transport.streams import (
    AnswerReceiver,
    Cancellation,
    ExchangeAnswer,
    TransferCalls,
    receive_answer,
)

INTRODUCTION_SECONDS = 5.0


class ServerChannel:
    """A channel and all its stubs.

    The stubs are created at once: creating a stub on a closed channel crashes gRPC's C core.

    Attributes:
        address: HOST:PORT of the server.
        is_closed: The channel is closed.
        exchanges: Stub of the Exchange call.
        shard: Stub of the parameter server service.
        coordinator: Stub of the coordinator service.
    """

    def __init__(self, address: str, tensors: bool) -> None:
        self.address = address
        self.is_closed = False
        self._channel = channel = open_channel(address, tensors)
        self.exchanges = ExchangeStub(channel)
        self.shard: ParameterServerServiceStub = ParameterServerServiceStub(channel)
        self.coordinator: CoordinatorServiceStub = CoordinatorServiceStub(channel)

    def close(self) -> None:
        """Close the channel, which ends all its calls. May be called again."""
        self.is_closed = True
        self._channel.close()

    def cancel(self, cause: object = None) -> None:
        """End a call that blocks the thread which made it; only closing the channel does.

        Calls of other threads on this channel are retried.
        """
        self.close()


class GrpcTransport:
    """The gRPC transport. Channels open when they are first used.

    Requests to the coordinator have their own channel, so heartbeats do not queue behind
    gradients. A forked child does not use the channels of its parent.

    Args:
        addresses: Server addresses by shard.
        given: Addresses that the user listed, perhaps with those of standbys.
    """

    direct = False

    def __init__(self, addresses: Sequence[str], given: Sequence[str] = ()) -> None:
        self.clock = Clock(time.monotonic, time.sleep)
        self._endpoints = Endpoints(addresses, given)
        self._lock = threading.Lock()
        self._channels: dict[tuple[str, bool], ServerChannel] = {}
        self._streams = TransferCalls()
        self._introductions: list[object] = []  # keeps the futures alive, so their calls go on
        self._is_closed = False
        _transports.add(self)

    @property
    def addresses(self) -> Sequence[str]:
        return self._endpoints.addresses

    def learn(
        self, job: str, addresses: Sequence[str], terms: Sequence[int], standbys: Sequence[str]
    ) -> None:
        if any(0 < term < self._endpoints.term(0) for term in terms[:1]):
            return  # a late answer of a former primary of shard 0
        if not self._endpoints.count(len(addresses)):
            return  # the next exchange raises LayoutError and finds the servers
        void: set[str] = set()
        for shard, known in enumerate(zip(addresses, terms, standbys, strict=False)):
            void |= self._endpoints.learn_from_shard_0(shard, *known)
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
            return self._channel(address).shard.Introduce.future(
                request, timeout=INTRODUCTION_SECONDS
            )
        return None

    def _close_channels(self, addresses: set[str]) -> None:
        """Close the channels to former primaries; their calls end and are retried elsewhere."""
        with self._lock:
            channels = [
                self._channels.pop(key) for key in list(self._channels) if key[0] in addresses
            ]
        for channel in channels:
            channel.close()

    def find_primaries(self, job: str, timeout: float) -> bool:
        endpoints, calls, void = self._endpoints, [], set[str]()
        for address in endpoints.known_addresses:
            channel = self._channel(address)
            # gRPC raises ValueError if another thread has closed the channel.
            with suppress(ValueError):
                calls.append(
                    (address, channel.shard.Describe.future(ps.DescribeRequest(), timeout=timeout))
                )
        for address, call in calls:
            with suppress(PSError), translated(address):
                found = call.result()
                check_wire_format(found.format, address, "this worker")
                if found.job == job and found.shard < len(self.addresses):
                    void |= endpoints.learn(found.shard, address, found.term)
        self._close_channels(void)
        return bool(void)

    def answers(self, timeout: float) -> bool:
        calls = []
        with suppress(ValueError, InvalidRequestError):  # another thread has closed the channel
            for address in self.addresses:
                describe = self._channel(address).shard.Describe
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
            channel.close()

    def join(self, request: co.JoinRequest, timeout: float) -> co.JoinResponse:
        with self._coordinator("Join") as stub:
            return stub.Join(request, timeout=timeout)

    def register(self, request: co.RegisterRequest, timeout: float) -> co.RegisterResponse:
        with self._coordinator("Register") as stub:
            return stub.Register(request, timeout=timeout)

    def heartbeat(self, request: co.HeartbeatRequest, timeout: float) -> co.HeartbeatResponse:
        with self._coordinator("Heartbeat") as stub:
            return stub.Heartbeat(request, timeout=timeout)

    def leave(self, request: co.LeaveRequest, timeout: float) -> co.LeaveResponse:
        with self._coordinator("Leave") as stub:
            return stub.Leave(request, timeout=timeout)

    def next_batch(self, request: co.NextBatchRequest, timeout: float) -> co.NextBatchResponse:
        with self._coordinator("NextBatch") as stub:
            return stub.NextBatch(request, timeout=timeout)

    def return_batches(
        self, request: co.ReturnBatchesRequest, timeout: float
    ) -> co.ReturnBatchesResponse:
        with self._coordinator("ReturnBatches") as stub:
            return stub.ReturnBatches(request, timeout=timeout)

    def collective(self, request: co.CollectiveRequest, timeout: float) -> co.CollectiveResponse:
        with self._coordinator("Collective") as stub:
            return stub.Collective(request, timeout=timeout)

    def report(self, request: co.ReportMetricsRequest, timeout: float) -> co.ReportMetricsResponse:
        with self._coordinator("ReportMetrics") as stub:
            return stub.ReportMetrics(request, timeout=timeout)

    def status(self, request: co.GetStatusRequest, timeout: float) -> co.GetStatusResponse:
        with self._coordinator("GetStatus") as stub:
            return stub.GetStatus(request, timeout=timeout)

    def attach(
        self, shard: int, request: ps.AttachMemoryRequest, timeout: float
    ) -> ps.AttachMemoryResponse:
        with (
            self._at(shard, "AttachMemory", tensors=True) as channel,
            interruptible.deferred(channel.cancel),
        ):
            return channel.shard.AttachMemory(request, timeout=timeout)

    def find_addresses(self, timeout: float) -> Sequence[str]:
        with (
            self._at(0, "Describe", tensors=True) as channel,
            interruptible.deferred(channel.cancel),
        ):
            found = tuple(channel.shard.Describe(ps.DescribeRequest(), timeout=timeout).addresses)
            self._endpoints.count(len(found))
            return found

    def relocate(self, addresses: Sequence[str]) -> None:
        self._close_channels(self._endpoints.relocate(addresses))

    def exchange(
        self,
        shard: int,
        header: ps.PushPullHeader,
        send: Sequence[memoryview],
        receiver: AnswerReceiver,
        timeout: float,
        cancellation: Cancellation,
        frames: Iterator[bytes] | None = None,
    ) -> ExchangeAnswer:
        self._endpoints.check_layout()
        header.term = self._endpoints.term(shard)
        with self._at(shard, "Exchange", tensors=True) as channel:
            if header.memory:
                request = encode_header(header)
                answer = _exchange_once(channel, request, receiver, timeout, cancellation, True)
            elif frames is None and _fits_once(header, send, receiver):
                request = encode_header(header, *(send if header.has_data else ()))
                answer = _exchange_once(channel, request, receiver, timeout, cancellation)
            else:
                if frames is None and header.has_data:
                    frames = itertools.chain([encode_header(header)], chunks(send))
                with self._streams.open(channel.address, timeout, receiver) as stream:
                    stub = channel.exchanges
                    call = (
                        stub.ask(encode_header(header))
                        if frames is None
                        else stub.stream(stream.watch(frames))
                    )
                    answer = stream.answer(call, cancellation)
            self._endpoints.check(shard, answer.result.term)
            return answer

    def end_stalled(self) -> None:
        self._streams.end_stalled()

    def close(self) -> None:
        """Close all channels. May be called again, and in a forked child."""
        self._is_closed = True
        self.end_calls()

    @contextmanager
    def _at(self, shard: int, method: str, tensors: bool = False) -> Iterator[ServerChannel]:
        """Yield the channel to a shard's server; after a failure the next call uses the other."""
        address = self.addresses[shard]
        channel = self._channel(address, tensors)
        try:
            with translated(f"shard {shard} at {address} ({method})"):
                yield channel
        except UnreachableError as error:
            if error.reason in ("UNREACHABLE", "NOT_PRIMARY") and not channel.is_closed:
                self._endpoints.switch(shard, address)
            raise
        except ValueError as closed:
            # gRPC raises ValueError on a closed channel: the server is no longer primary, or
            # another thread has cancelled a call on it.
            if self._is_closed or not channel.is_closed:
                raise
            raise UnreachableError(
                f"the channel to shard {shard} at {address} was closed", "NOT_PRIMARY"
            ) from closed

    @contextmanager
    def _coordinator(self, method: str) -> Iterator[CoordinatorServiceStub]:
        with self._at(0, method) as channel, interruptible.deferred(channel.cancel):
            yield channel.coordinator

    def _channel(self, address: str, tensors: bool = False) -> "ServerChannel":
        with self._lock:
            if self._is_closed:
                raise InvalidRequestError("this Client is closed")
            channel = self._channels.get((address, tensors))
            if channel is None or channel.is_closed:
                channel = self._channels[address, tensors] = ServerChannel(address, tensors)
            return channel

    def drop_inherited_channels(self) -> None:
        """In a forked child: drop the parent's channels without closing them, which could hang."""
        _inherited.extend(self._channels.values())
        self._lock, self._channels = threading.Lock(), {}


_transports: "weakref.WeakSet[GrpcTransport]" = weakref.WeakSet()
_inherited: list[Any] = []


def _after_fork() -> None:
    for transport in list(_transports):
        transport.drop_inherited_channels()


os.register_at_fork(after_in_child=_after_fork)


def _fits_once(
    header: ps.PushPullHeader, send: Sequence[memoryview], receiver: AnswerReceiver
) -> bool:
    """Return whether one message in each direction suffices."""
    answer = ps.ExchangeResult(pulled=header.pull != ps.PULL_NONE)
    return (
        sum(view.nbytes for view in send)
        <= FRAME_BYTES
        >= sum(view.nbytes for view in receiver.views(answer))
    )


def _exchange_once(
    channel: ServerChannel,
    request: bytes,
    receiver: AnswerReceiver,
    timeout: float,
    cancellation: Cancellation,
    in_memory: bool = False,
) -> ExchangeAnswer:
    """Exchange one message in each direction. in_memory: The bytes are in shared memory."""
    once: Any = channel.exchanges.once
    call: Any = channel
    started = time.monotonic()
    if not cancellation.is_alone:  # a blocking call spares one of gRPC's threads
        call = once.future(request, timeout=timeout)
    cancellation.attach(call)
    try:
        answer = once(request, timeout=timeout) if call is channel else call.result()
    finally:
        cancellation.detach(call)
    result = receive_answer(iter([decode_response(answer)]), receiver, in_memory)
    return ExchangeAnswer(result, time.monotonic() - started, 0.0)
