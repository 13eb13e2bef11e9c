"""Records the wire conversation with the servers of this checkout.

`python -m tests.contract.wire.record [FILE]`

Processes reach each other through a proxy that passes one message at a time: the next one waits
until the effects of the previous one have arrived. The file therefore has messages in causal order.
"""

import itertools
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import grpc

from pscommon.wire.endpoint import SERVER_OPTIONS, Endpoint, open_channel
from tests.contract.wire.conversation import (
    FIXTURE,
    HEARTBEAT,
    JOIN,
    PLACEHOLDERS,
    SHARD_0,
    SHARD_1,
    STANDBY,
    STREAMS,
    Call,
    Conversation,
    Event,
    Kind,
    RepetitionFilter,
    client_of,
    encoded,
    is_stream,
    masked,
    parsed,
)
from tests.contract.wire.parties import (
    SETTINGS,
    fixed_job_key,
    key_of_worker,
    numbers_of,
    read_only,
    work,
)
from tests.support.cluster import Cluster
from tests.support.standbys import RunningStandby
from tests.support.wire_calls import sent_by
from tests.support.workers import until

QUIET = 0.05
"""Seconds from one message to the next."""


class Recorder:
    """Records all messages in order."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.events: list[Event] = []
        self.addresses: dict[str, str] = {}
        self._changed = threading.Condition()
        self._waiting: list[tuple[int, int]] = []
        self._tickets = itertools.count()
        self._passed = 0.0
        self._repetitions: dict[tuple[int, Kind], RepetitionFilter] = {}
        self._heartbeats: dict[int, list[Event]] = {}
        self.has_heartbeat = False

    def call(self, method: str, server: str) -> int:
        with self._changed:
            self.calls.append(Call(method, client_of(method), server))
            return len(self.calls) - 1

    def message(self, number: int, kind: Kind, data: bytes) -> bytes:
        """Wait for the turn of a message; return the message to pass on."""
        method = self.calls[number].method
        message = masked(parsed(method, kind, data), self.addresses)
        if method in STREAMS and self._repetitions.setdefault(
            (number, kind), RepetitionFilter()
        ).is_repeated(message):
            return data
        event = Event(number, kind, encoded(message))
        if method == HEARTBEAT:  # a late heartbeat fails
            self._heartbeats.setdefault(number, []).append(event)
        else:
            self._add_in_turn(event, (_urgency(method, kind), next(self._tickets)))
        # host name and PID of the worker are in texts that the log's digest covers
        return event.data if method == JOIN and kind == "request" else data

    def _add_in_turn(self, event: Event, ticket: tuple[int, int]) -> None:
        with self._changed:
            self._waiting.append(ticket)
            while (
                ticket != min(self._waiting)
                or (left := self._passed + QUIET - time.monotonic()) > 0
            ):
                self._changed.wait(left if ticket == min(self._waiting) else None)
            self._waiting.remove(ticket)
            self.events.append(event)
            self._passed = time.monotonic()
            self._changed.notify_all()

    def closed(self, number: int) -> None:
        """Note that the client sends no more; in unary calls this follows from the request."""
        if is_stream(self.calls[number].method):
            self.events.append(Event(number, "closed", b""))

    def end(self, number: int, code: str) -> None:
        event = Event(number, "end", code.encode())
        with self._changed:
            if number not in self._heartbeats:
                self.events.append(event)
            elif code == "OK" and not self.has_heartbeat:
                self.events += [*self._heartbeats[number], event]
                self.has_heartbeat = True

    def wait_for(self, method: str, count: int) -> None:
        """Wait until `count` calls of this method have arrived."""
        until(
            lambda: [call.method for call in self.calls].count(method) >= count,
            f"{count} calls of {method}",
        )
        if method == HEARTBEAT:
            until(lambda: self.has_heartbeat, "an answer")

    def wait_for_quiet(self) -> None:
        """Wait until only repeated messages arrive for some time."""
        until(lambda: not self._waiting and time.monotonic() - self._passed > 10 * QUIET, "quiet")


def _urgency(method: str, kind: Kind) -> int:
    """Return the priority: effects of a request precede the next request."""
    if client_of(method) == STANDBY:
        return 0
    return 1 if kind == "answer" else 2 if client_of(method) == SHARD_1 else 3


class RecordingProxy(grpc.GenericRpcHandler):
    """Passes calls of any method to a server."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self._name = recorder, name
        self.target = ""
        self._server = grpc.server(ThreadPoolExecutor(64), options=SERVER_OPTIONS)
        self._server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        recorder.addresses[self.address] = PLACEHOLDERS[name]
        self._server.start()

    def close(self) -> None:
        self._server.stop(0).wait()

    def service(self, details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any]":
        method = details.method

        def relay(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            return self._relay(str(method), requests, context)

        return grpc.stream_stream_rpc_method_handler(relay)

    def _relay(
        self, method: str, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        recorder = self._recorder
        number = recorder.call(method, self._name)

        def passed() -> Iterator[bytes]:
            for data in requests:
                yield recorder.message(number, "request", data)
            if method not in STREAMS:
                recorder.closed(number)

        with closing(open_channel(Endpoint(self.target))) as channel:
            upstream: Any = channel.stream_stream(method)(
                passed(), metadata=sent_by(key_of_worker())
            )
            context.add_callback(upstream.cancel)
            try:
                for data in upstream:
                    yield recorder.message(number, "answer", data)
            except grpc.RpcError:
                pass
            if method not in STREAMS:
                recorder.end(number, upstream.code().name)
            if upstream.code() is not grpc.StatusCode.OK:
                context.set_trailing_metadata(upstream.trailing_metadata())
                context.abort(upstream.code(), upstream.details())


def record_conversation() -> Conversation:
    """Return the conversation and the final numbers."""
    recorder = Recorder()
    with ExitStack() as stack:
        first, second = proxies = [RecordingProxy(recorder, name) for name in (SHARD_0, SHARD_1)]
        for proxy in proxies:
            stack.callback(proxy.close)
        stack.enter_context(fixed_job_key())
        servers = Cluster(0)
        stack.callback(servers.close)

        def start(shard: int, proxy: RecordingProxy) -> None:
            server = servers.add(
                shard, 2, **{**SETTINGS, "advertise": proxy.address, "join": first.address}
            )
            proxy.target = server.address

        start(0, first)
        primary = servers.servers[0]
        standby = RunningStandby(primary, advertise=None, standby_of=first.address)
        recorder.addresses[standby.standby.advertised] = PLACEHOLDERS[STANDBY]
        with standby:
            standby.in_sync()
            recorder.wait_for_quiet()
            start(1, second)
            recorder.wait_for_quiet()
            weights = work(first.address, recorder.wait_for)
            recorder.wait_for_quiet()
            events = list(recorder.events)
            numbers = numbers_of(primary.engine.live.store)
    return Conversation(recorder.calls, events, read_only(weights), numbers)


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else FIXTURE
    path.parent.mkdir(parents=True, exist_ok=True)
    record_conversation().save(path)


if __name__ == "__main__":
    main()
