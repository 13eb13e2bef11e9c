"""Plays all but one process of the recorded conversation and compares the messages of that process.

Events are played in their order: the player waits for messages of the real process and sends
recorded messages of the others. Between events it repeats the newest messages on streams, as real
processes do.
"""

import queue
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Self

import grpc
from google.protobuf import text_format
from google.protobuf.message import Message

from pscommon.wire.endpoint import SERVER_OPTIONS, Endpoint, open_channel
from psproto.v1.standby_pb2 import ReplicateRequest
from tests.contract.wire.conversation import (
    HEARTBEAT,
    LOG_ID,
    LOG_IDS,
    NO_LOG,
    PLACEHOLDERS,
    STREAMS,
    Call,
    Conversation,
    Event,
    Kind,
    RepetitionFilter,
    encoded,
    is_stream,
    masked,
    parsed,
    repeatable,
    unmasked,
)
from tests.contract.wire.parties import fixed_job_key, key_of_worker
from tests.support.wire_calls import sent_by
from tests.support.workers import until

WAIT_SECONDS = 30.0
BEAT_SECONDS = 0.4


class PlayedCall:
    """One call: the messages received from the real process and the messages to send."""

    def __init__(self, player: "Player", call: Call, received: Kind) -> None:
        self.call = call
        self._player, self._kind = player, received
        self._repetitions = RepetitionFilter()
        self._received: queue.SimpleQueue[Message | str] = queue.SimpleQueue()
        self._sent: queue.SimpleQueue[Message | grpc.StatusCode | None] = queue.SimpleQueue()
        self._repeated: Message | None = None
        self._acknowledged = 0
        self.code: grpc.StatusCode | None = None

    def receive(self, data: bytes) -> None:
        """Accept a message of the real process."""
        message = parsed(self.call.method, self._kind, data)
        self._player.learn_log_id(message)
        message = masked(message, self._player.names)
        if self.call.method not in STREAMS or not self._repetitions.is_repeated(message):
            self._received.put(message)

    def receive_end(self, text: str) -> None:
        self._received.put(text)

    def expect(self, data: bytes) -> None:
        """Check the next message."""
        expected = parsed(self.call.method, self._kind, data)
        if isinstance(expected, ReplicateRequest) and expected.received:
            self._expect_acknowledged(expected.received)
            return
        found = self._next()
        assert isinstance(found, Message), f"{self.call}: {found!r} instead of {_shown(expected)}"
        assert encoded(found) == encoded(expected), (
            f"{self.call}\nfound:    {_shown(found)}\nexpected: {_shown(expected)}"
        )

    def _expect_acknowledged(self, number: int) -> None:
        """Check an acknowledgement, which covers all earlier records."""
        while self._acknowledged < number:
            found = self._next()
            assert isinstance(found, ReplicateRequest), (
                f"{self.call}: {found!r} instead of an acknowledgement"
            )
            assert found.received > self._acknowledged, (
                f"{self.call}: {_shown(found)} after {self._acknowledged}"
            )
            self._acknowledged = found.received

    def expect_end(self, text: str) -> None:
        found = self._next()
        assert found == text, f"{self.call} ended with {found!r} instead of {text!r}"

    def _next(self) -> Any:
        try:
            return self._received.get(timeout=WAIT_SECONDS)
        except queue.Empty:
            raise AssertionError(f"{self.call}: nothing came for {WAIT_SECONDS:.0f} s") from None

    def send(self, data: bytes) -> None:
        kind: Kind = "answer" if self._kind == "request" else "request"
        message = unmasked(
            parsed(self.call.method, kind, data), self._player.addresses, self._player.log_id
        )
        self._sent.put(message)
        self._repeated = repeatable(message)

    def repeat(self) -> None:
        if self.call.method in STREAMS and self._repeated is not None:
            self._sent.put(self._repeated)

    def end(self, code: grpc.StatusCode | None = None) -> None:
        """Send no more messages."""
        self._sent.put(code)

    def outgoing(self) -> Iterator[bytes]:
        """Yield messages to send until the end."""
        while isinstance(message := self._sent.get(), Message):
            yield message.SerializeToString()
        self.code = message


class Player:
    """Context that plays a conversation. real: process under test; addresses: by placeholder."""

    def __init__(self, conversation: Conversation, real: str) -> None:
        self.addresses: dict[str, str] = {}
        self.log_id = LOG_ID
        self._conversation, self._real = conversation, real
        self._lines: dict[int, PlayedCall] = {}
        self._arrived: list[PlayedCall] = []
        self._changed = threading.Condition()
        self._resources = ExitStack()
        self._ended = threading.Event()

    @property
    def names(self) -> Mapping[str, str]:
        return {address: name for name, address in self.addresses.items()}

    def set_address(self, name: str, address: str) -> None:
        """Set the address of a process."""
        self.addresses[PLACEHOLDERS[name]] = address

    def learn_log_id(self, message: Message) -> None:
        """Read the log_id, which shard 0 draws."""
        found = getattr(message, "epoch", NO_LOG) if message.DESCRIPTOR.name in LOG_IDS else NO_LOG
        if found != NO_LOG:
            self.log_id = found

    def __enter__(self) -> Self:
        threading.Thread(target=self._repeat, daemon=True).start()
        self._resources.callback(self._ended.set)
        self._resources.enter_context(fixed_job_key())
        return self

    def __exit__(self, *error: object) -> None:
        for line in [*self._lines.values(), *self._arrived]:
            line.end(grpc.StatusCode.UNAVAILABLE)
        self._resources.close()

    def _repeat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            for line in list(self._lines.values()):
                line.repeat()

    # ---- the player as a server ------------------------------------------------------------------

    def serve(self, name: str) -> str:
        """Act as this server for the real process; return the address."""
        server = grpc.server(ThreadPoolExecutor(64), options=SERVER_OPTIONS)
        server.add_generic_rpc_handlers((_Handler(self, name),))
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        self.set_address(name, address)
        server.start()
        self._resources.callback(lambda: server.stop(0).wait())
        return address

    def wait_for(self, method: str, count: int) -> None:
        """Wait until the real process has made `count` calls of this method."""
        until(
            lambda: sum(line.call.method == method for line in self._arrived) >= count,
            f"{count} calls of {method}",
        )

    def answer(
        self, call: Call, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """Answer a call of the real process."""
        line = PlayedCall(self, call, "request")
        with self._changed:
            self._arrived.append(line)
            self._changed.notify_all()
        reader = threading.Thread(target=self._read, args=(line, requests), daemon=True)
        reader.start()
        if call.method == HEARTBEAT:  # they come when it is time
            line.send(self._recorded(HEARTBEAT, "answer"))
            line.end(grpc.StatusCode.OK)
        yield from line.outgoing()
        if line.code not in (None, grpc.StatusCode.OK):
            context.abort(line.code, "the conversation is over")

    def _read(self, line: PlayedCall, requests: Iterator[bytes]) -> None:
        try:
            for data in requests:
                line.receive(data)
        except Exception as error:  # gRPC's, of a call that the client cancelled
            line.receive_end(f"cancelled: {error!r}")
            return
        if is_stream(line.call.method):
            line.receive_end("closed")

    def _recorded(self, method: str, kind: Kind) -> bytes:
        calls = self._conversation.calls
        return next(
            event.data
            for event in self._conversation.events
            if (calls[event.call].method, event.kind) == (method, kind)
        )

    def _arrival(self, number: int) -> PlayedCall:
        call = self._conversation.calls[number]
        with self._changed:
            if number not in self._lines:
                taken = list(self._lines.values())

                def waiting() -> list[PlayedCall]:
                    return [
                        line for line in self._arrived if line.call == call and line not in taken
                    ]

                assert self._changed.wait_for(waiting, WAIT_SECONDS), f"{call} did not come"
                self._lines[number] = waiting()[0]
            return self._lines[number]

    # ---- the player as a client ------------------------------------------------------------------

    def _opened(self, number: int) -> PlayedCall:
        if number not in self._lines:
            call = self._conversation.calls[number]
            line = self._lines[number] = PlayedCall(self, call, "answer")
            server = Endpoint(self.addresses[PLACEHOLDERS[call.server]])
            channel = open_channel(server, tensors=True)
            self._resources.callback(channel.close)
            answers: Any = channel.stream_stream(call.method)(
                line.outgoing(), timeout=4 * WAIT_SECONDS, metadata=sent_by(key_of_worker())
            )
            self._resources.callback(answers.cancel)
            threading.Thread(
                target=self._receive_answers, args=(line, answers), daemon=True
            ).start()
        return self._lines[number]

    def _receive_answers(self, line: PlayedCall, answers: Any) -> None:
        try:
            for data in answers:
                line.receive(data)
        except grpc.RpcError:
            pass
        line.receive_end(answers.code().name)

    # ---- events ----------------------------------------------------------------------------------

    def play(self) -> None:
        """Play all events; AssertionError if the real process sends another message than the
        recorded one.
        """
        for event in self._conversation.events:
            call = self._conversation.calls[event.call]
            if call.client == self._real and call.method != HEARTBEAT:
                self._play_server(self._arrival(event.call), event)
            elif call.server == self._real and self._real != call.client:
                self._play_client(self._opened(event.call), event)

    def _play_server(self, line: PlayedCall, event: Event) -> None:
        match event.kind:
            case "request":
                line.expect(event.data)
            case "closed":
                line.expect_end("closed")
            case "answer":
                line.send(event.data)
            case "end":
                line.end(grpc.StatusCode[event.data.decode()])

    def _play_client(self, line: PlayedCall, event: Event) -> None:
        match event.kind:
            case "request":
                line.send(event.data)
                if not is_stream(line.call.method):
                    line.end()
            case "closed":
                line.end()
            case "answer":
                line.expect(event.data)
            case "end":
                line.expect_end(event.data.decode())


class _Handler(grpc.GenericRpcHandler):
    """Handles all methods of one played server."""

    def __init__(self, player: Player, name: str) -> None:
        self._player, self._name = player, name

    def service(self, details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any]":
        call = Call(str(details.method), self._player._real, self._name)

        def answer(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            return self._player.answer(call, requests, context)

        return grpc.stream_stream_rpc_method_handler(answer)


def _shown(message: Message) -> str:
    return text_format.MessageToString(message, as_one_line=True)
