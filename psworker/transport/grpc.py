"""Transport of a worker's requests to the servers: the protocol, and its gRPC implementation.

The layers above are the same over gRPC and in a simulation.
"""

import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

import grpc

from pscommon.core.errors import InvalidRequestError, PSError, UnreachableError
from pscommon.core.formats import check_wire_format
from pscommon.system import signals as interruptible
from pscommon.wire.channel import FRAME_BYTES, open_channel
from pscommon.wire.frames import ExchangeStub, Frame, chunks, decode_response, encode_header
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
    take,
)

T = TypeVar("T")

INTRODUCTION_SECONDS = 5.0


class Transport(Protocol):
    """Requests to the coordinator and to each shard.

    All methods raise PSErrors. `timeout` is the deadline of one call in seconds.

    Attributes:
        direct: Calls run in the caller's thread; there are no other threads and no heartbeats.
        clock: Source of all times and pauses of the client.
        addresses: Server addresses by shard.
    """

    direct: bool
    clock: Clock

    @property
    def addresses(self) -> Sequence[str]: ...

    def learn(
        self, job: str, addresses: Sequence[str], terms: Sequence[int], standbys: Sequence[str]
    ) -> None:
        """Take the addresses that shard 0 knows.

        A primary with a higher term, or one restarted elsewhere, replaces the known addresses.

        Args:
            job: The job's identifier.
            addresses: Primaries by shard; empty where shard 0 knows none. Such a shard may not
                know shard 0 either.
            terms: Terms by shard; 0 where unknown.
            standbys: Standbys by shard; empty where unknown.
        """
        ...

    def look_around(self, job: str, timeout: float) -> bool:
        """Ask all known servers which of them are primaries; return whether a primary is new.

        For use while the coordinator does not answer.
        """
        ...

    def end_stalled(self) -> None:
        """End the exchanges that have moved no bytes for their timeout; call it periodically."""
        ...

    def answers(self, timeout: float) -> bool:
        """Probe all shards at the same time; return whether all answered within the timeout."""
        ...

    def end_calls(self) -> None:
        """End all calls in flight as if no server answered. Later calls work as usual."""
        ...

    def join(self, request: co.JoinRequest, timeout: float) -> co.JoinResponse: ...
    def register(self, request: co.RegisterRequest, timeout: float) -> co.RegisterResponse: ...
    def heartbeat(self, request: co.HeartbeatRequest, timeout: float) -> co.HeartbeatResponse: ...
    def leave(self, request: co.LeaveRequest, timeout: float) -> co.LeaveResponse: ...
    def next_batch(self, request: co.NextBatchRequest, timeout: float) -> co.NextBatchResponse: ...
    def return_batches(
        self, request: co.ReturnBatchesRequest, timeout: float
    ) -> co.ReturnBatchesResponse: ...
    def report(
        self, request: co.ReportMetricsRequest, timeout: float
    ) -> co.ReportMetricsResponse: ...
    def status(self, request: co.GetStatusRequest, timeout: float) -> co.GetStatusResponse: ...

    def attach(
        self, shard: int, request: ps.AttachMemoryRequest, timeout: float
    ) -> ps.AttachMemoryResponse: ...

    def whereabouts(self, timeout: float) -> Sequence[str]:
        """Return the servers' addresses as shard 0 knows them, by shard; empty before a join."""
        ...

    def relocate(self, addresses: Sequence[str]) -> None:
        """Replace the servers after a reshard.

        Shard 0 keeps its address, and no exchange may be under way.
        """
        ...

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
        """Make one Exchange call. After an error the receiver's memory may be partly written.

        Args:
            shard: Index of the shard.
            header: Header of the request.
            send: Bytes to send, if header.has_data is set.
            receiver: Memory for the bytes of the answer.
            timeout: Deadline in seconds.
            cancellation: Ends the call from another thread.
            frames: Encoded frames to send instead of `header` and `send`.
        """
        ...

    def close(self) -> None: ...


class ServerChannel:
    """A channel and all its stubs.

    The stubs are created at once: creating a stub on a closed channel crashes gRPC's C core.

    Attributes:
        address: HOST:PORT of the server.
        closed: The channel is closed.
        exchanges: Stub of the Exchange call.
        shard: Stub of the parameter server service.
        coordinator: Stub of the coordinator service.
    """

    def __init__(self, address: str, tensors: bool) -> None:
        self.address = address
        self.closed = False
        self.exchanges = ExchangeStub(channel := open_channel(address, tensors))
        self.shard: ParameterServerServiceStub = ParameterServerServiceStub(channel)
        self.coordinator: CoordinatorServiceStub = CoordinatorServiceStub(channel)
        self._channel = channel

    def close(self) -> None:
        """Close the channel, which ends all its calls. May be called again."""
        self.closed = True
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
        self._places = Endpoints(addresses, given)
        self._lock = threading.Lock()
        self._lines: dict[tuple[str, bool], ServerChannel] = {}
        self._streams = TransferCalls()
        self._introductions: list[object] = []  # keeps the futures alive, so their calls go on
        self._closed = False
        _lanes.add(self)

    @property
    def addresses(self) -> Sequence[str]:
        return self._places.addresses

    def learn(
        self, job: str, addresses: Sequence[str], terms: Sequence[int], standbys: Sequence[str]
    ) -> None:
        if any(0 < term < self._places.term(0) for term in terms[:1]):
            return  # a late answer of a former primary of shard 0
        if not self._places.count(len(addresses)):
            return  # the next exchange raises LayoutError and finds the servers
        void: set[str] = set()
        for shard, known in enumerate(zip(addresses, terms, standbys, strict=False)):
            void |= self._places.told(shard, *known)
        self._leave(void)
        # Not strict: another thread may change the number of addresses.
        first, *others = zip(self.addresses, addresses, strict=False)
        strangers = [address for address, known in others if not known]
        self._introductions = [self._introduce(address, job, first[0]) for address in strangers]

    def _introduce(self, address: str, job: str, coordinator: str) -> object:
        """Send a shard the address of shard 0 without waiting; the next `learn` retries."""
        request = ps.IntroduceRequest(coordinator=coordinator, job=job)
        with suppress(ValueError, InvalidRequestError), interruptible.deferred(lambda _: None):
            # ValueError or InvalidRequestError: another thread has closed the channel.
            return self._line(address).shard.Introduce.future(request, timeout=INTRODUCTION_SECONDS)
        return None

    def _leave(self, gone: set[str]) -> None:
        """Close the channels to former primaries; their calls end and are retried elsewhere."""
        with self._lock:
            lines = [self._lines.pop(key) for key in list(self._lines) if key[0] in gone]
        for line in lines:
            line.close()

    def look_around(self, job: str, timeout: float) -> bool:
        places, calls, void = self._places, [], set[str]()
        for address in places.known:
            line = self._line(address)
            # gRPC raises ValueError if another thread has closed the channel.
            with suppress(ValueError):
                calls.append(
                    (address, line.shard.Describe.future(ps.DescribeRequest(), timeout=timeout))
                )
        for address, call in calls:
            with suppress(PSError), translated(address):
                found = call.result()
                check_wire_format(found.format, address, "this worker")
                if found.job == job and found.shard < len(self.addresses):
                    void |= places.learn(found.shard, address, found.term)
        self._leave(void)
        return bool(void)

    def answers(self, timeout: float) -> bool:
        calls = []
        with suppress(ValueError, InvalidRequestError):  # another thread has closed the channel
            for address in self.addresses:
                describe = self._line(address).shard.Describe
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
            lines, self._lines = list(self._lines.values()), {}
        for line in lines:
            line.close()

    def join(self, request: co.JoinRequest, timeout: float) -> co.JoinResponse:
        return self._ask("Join", lambda stub: stub.Join(request, timeout=timeout))

    def register(self, request: co.RegisterRequest, timeout: float) -> co.RegisterResponse:
        return self._ask("Register", lambda stub: stub.Register(request, timeout=timeout))

    def heartbeat(self, request: co.HeartbeatRequest, timeout: float) -> co.HeartbeatResponse:
        return self._ask("Heartbeat", lambda stub: stub.Heartbeat(request, timeout=timeout))

    def leave(self, request: co.LeaveRequest, timeout: float) -> co.LeaveResponse:
        return self._ask("Leave", lambda stub: stub.Leave(request, timeout=timeout))

    def next_batch(self, request: co.NextBatchRequest, timeout: float) -> co.NextBatchResponse:
        return self._ask("NextBatch", lambda stub: stub.NextBatch(request, timeout=timeout))

    def return_batches(
        self, request: co.ReturnBatchesRequest, timeout: float
    ) -> co.ReturnBatchesResponse:
        return self._ask("ReturnBatches", lambda stub: stub.ReturnBatches(request, timeout=timeout))

    def report(self, request: co.ReportMetricsRequest, timeout: float) -> co.ReportMetricsResponse:
        return self._ask("ReportMetrics", lambda stub: stub.ReportMetrics(request, timeout=timeout))

    def status(self, request: co.GetStatusRequest, timeout: float) -> co.GetStatusResponse:
        return self._ask("GetStatus", lambda stub: stub.GetStatus(request, timeout=timeout))

    def attach(
        self, shard: int, request: ps.AttachMemoryRequest, timeout: float
    ) -> ps.AttachMemoryResponse:
        with (
            self._at(shard, "AttachMemory", tensors=True) as line,
            interruptible.deferred(line.cancel),
        ):
            return line.shard.AttachMemory(request, timeout=timeout)

    def whereabouts(self, timeout: float) -> Sequence[str]:
        with self._at(0, "Describe", tensors=True) as line, interruptible.deferred(line.cancel):
            found = tuple(line.shard.Describe(ps.DescribeRequest(), timeout=timeout).addresses)
            self._places.count(len(found))
            return found

    def relocate(self, addresses: Sequence[str]) -> None:
        self._leave(self._places.relocate(addresses))

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
        self._places.check_layout()
        header.term = self._places.term(shard)
        with self._at(shard, "Exchange", tensors=True) as line:
            answer = self._exchange(line, header, send, receiver, timeout, cancellation, frames)
            self._places.check(shard, answer.result.term)
            return answer

    def _exchange(
        self,
        line: ServerChannel,
        header: ps.PushPullHeader,
        send: Sequence[memoryview],
        receiver: AnswerReceiver,
        timeout: float,
        cancellation: Cancellation,
        frames: Iterator[bytes] | None,
    ) -> ExchangeAnswer:
        stub, started = line.exchanges, time.monotonic()
        if header.memory:
            answer = _once(line, encode_header(header), timeout, cancellation)
            return ExchangeAnswer(
                take(answer, receiver, in_memory=True), time.monotonic() - started, 0.0
            )
        if frames is None and _fits_once(header, send, receiver):
            request = encode_header(header, *(send if header.has_data else ()))
            return ExchangeAnswer(
                take(_once(line, request, timeout, cancellation), receiver),
                time.monotonic() - started,
                0.0,
            )
        if frames is None and header.has_data:
            frames = itertools.chain([encode_header(header)], chunks(send))
        with self._streams.open(line.address, timeout, receiver) as stream:
            call = (
                stub.ask(encode_header(header))
                if frames is None
                else stub.stream(stream.watched(frames))
            )
            return stream.answer(call, cancellation)

    def end_stalled(self) -> None:
        self._streams.end_stalled()

    def close(self) -> None:
        """Close all channels. May be called again, and in a forked child."""
        self._closed = True
        self.end_calls()

    @contextmanager
    def _at(self, shard: int, method: str, tensors: bool = False) -> Iterator[ServerChannel]:
        """Yield the channel to a shard's server; after a failure the next call uses the other."""
        address = self.addresses[shard]
        line = self._line(address, tensors)
        try:
            with translated(f"shard {shard} at {address} ({method})"):
                yield line
        except UnreachableError as error:
            if error.reason in ("UNREACHABLE", "NOT_PRIMARY") and not line.closed:
                self._places.failed(shard, address)
            raise
        except ValueError as closed:
            # gRPC raises ValueError on a closed channel: the server is no longer primary, or
            # another thread has cancelled a call on it.
            if self._closed or not line.closed:
                raise
            raise UnreachableError(
                f"the line to shard {shard} at {address} was closed", "NOT_PRIMARY"
            ) from closed

    def _ask(self, method: str, call: Callable[[CoordinatorServiceStub], T]) -> T:
        with self._at(0, method) as line, interruptible.deferred(line.cancel):
            return call(line.coordinator)

    def _line(self, address: str, tensors: bool = False) -> "ServerChannel":
        with self._lock:
            if self._closed:
                raise InvalidRequestError("this Client is closed")
            line = self._lines.get((address, tensors))
            if line is None or line.closed:
                line = self._lines[address, tensors] = ServerChannel(address, tensors)
            return line

    def forget(self) -> None:
        """In a forked child: drop the parent's channels without closing them, which could hang."""
        _inherited.extend(self._lines.values())
        self._lock, self._lines = threading.Lock(), {}


_lanes: "weakref.WeakSet[GrpcTransport]" = weakref.WeakSet()
_inherited: list[Any] = []


def _after_fork() -> None:
    for lane in list(_lanes):
        lane.forget()


os.register_at_fork(after_in_child=_after_fork)


def _fits_once(
    header: ps.PushPullHeader, send: Sequence[memoryview], receiver: AnswerReceiver
) -> bool:
    """Return whether one message in each direction suffices."""
    most = ps.ExchangeResult(pulled=header.pull != ps.PULL_NONE)
    return (
        sum(view.nbytes for view in send)
        <= FRAME_BYTES
        >= sum(view.nbytes for view in receiver.views(most))
    )


def _once(
    line: ServerChannel, request: bytes, timeout: float, cancellation: Cancellation
) -> Iterator[Frame[ps.ExchangeResult]]:
    once: Any = line.exchanges.once
    call: Any = line
    if not cancellation.alone:  # a blocking call spares one of gRPC's threads
        call = once.future(request, timeout=timeout)
    cancellation.attach(call)
    try:
        return iter(
            [decode_response(once(request, timeout=timeout) if call is line else call.result())]
        )
    finally:
        cancellation.detach(call)
