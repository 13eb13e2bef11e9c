"""A worker's socket connection to one server: exchanges and their memory, or requests to the
coordinator.
"""

import socket
import time
from collections.abc import Iterator, Sequence

from pscommon.core.errors import PSError
from pscommon.wire.blocking_socket import BlockingSocket
from pscommon.wire.frames import Frame
from pscommon.wire.requests import STREAM_FIELDS, A, Q, Request
from pscommon.wire.status import error_of
from pscommon.wire.stream_format import (
    EAGER_BYTES,
    FrameKind,
    FramePrefix,
    decode_message,
    encode_frame,
)
from psproto.v1 import parameter_server_pb2 as ps
from psproto.v1 import stream_pb2
from psworker.transport.exchange_calls import AnswerReceiver, ExchangeAnswer


class SocketConnection(BlockingSocket):
    """An open connection; one exchange or request at a time."""

    def exchange(
        self,
        header: ps.PushPullHeader,
        send: Sequence[memoryview],
        receiver: AnswerReceiver,
        timeout: float,
        frames: Iterator[Frame[ps.PushPullHeader]] | None = None,
    ) -> ExchangeAnswer:
        """Make one exchange; see `Transport.exchange`. A failure without an answer breaks it.

        timeout: Longest time in seconds from the last byte of the push to the answer.
        """
        try:
            self.limit_silence(timeout)
            refusal = (
                self._push(header, send if header.has_data and not header.memory else (), receiver)
                if frames is None
                else self._push_open(frames, receiver)
            )
            sent_at = time.monotonic()
            prefix, message = refusal or self.next_frame(sent_at + timeout)
            answered = time.monotonic()
            if prefix.kind is not FrameKind.ERROR:
                result = decode_message(ps.ExchangeResult, message)
                self._receive_data(prefix, result, receiver, in_memory=header.memory > 0)
                return ExchangeAnswer(result, sent_at, time.monotonic() - answered)
        except OSError as error:
            raise self.lost(error) from error
        except BaseException:  # the rest of the answer may still come
            self.is_broken = True
            raise
        raise error_of(message, self._who)

    def request(self, row: Request[Q, A], message: Q, timeout: float) -> A:
        """Return the coordinator's answer to a request.

        timeout: Longest time in seconds to the answer.
        """
        sent = stream_pb2.CoordinatorRequest(**{STREAM_FIELDS[row]: message})  # type: ignore[arg-type]
        frame = encode_frame(FrameKind.REQUEST, sent.SerializeToString())
        return decode_message(row.response, self._ask(frame, timeout))

    def offer_memory(self, header: ps.PushPullHeader, descriptor: int, timeout: float) -> None:
        """Let the server map the shared memory with this descriptor. Raises why it does not.

        header: Names the worker and the number of the memory.
        timeout: Longest time in seconds to the answer.
        """
        self._ask(
            encode_frame(FrameKind.MEMORY, header.SerializeToString(), 1), timeout, descriptor
        )

    def _ask(self, frame: bytes, timeout: float, descriptor: int | None = None) -> bytes:
        """Send a frame, and a descriptor after it; return the message of the answer."""
        try:
            self.limit_silence(timeout)
            self.send([frame])
            if descriptor is not None:
                assert isinstance(self._socket, socket.socket)
                socket.send_fds(self._socket, [b"\0"], [descriptor])
            prefix, answer = self.next_frame(time.monotonic() + timeout)
        except OSError as error:
            raise self.lost(error) from error
        except BaseException:  # the answer may still come
            self.is_broken = True
            raise
        if prefix.kind is FrameKind.ERROR:
            raise error_of(answer, self._who)
        return answer

    def _push(
        self, header: ps.PushPullHeader, send: Sequence[memoryview], receiver: AnswerReceiver
    ) -> tuple[FramePrefix, bytes] | None:
        """Send a request. Return the answer if the server refuses the data."""
        nbytes = 0
        for view in send:
            nbytes += view.nbytes
        frame = encode_frame(FrameKind.EXCHANGE, header.SerializeToString(), nbytes)
        if nbytes <= EAGER_BYTES:
            self.send([frame, *send])
            return None
        self.send([frame])
        answer = self.next_frame(None)
        if answer[0].kind is not FrameKind.GO:
            return answer
        self.send(send, receiver.on_frame)
        return None

    def _push_open(
        self, frames: Iterator[Frame[ps.PushPullHeader]], receiver: AnswerReceiver
    ) -> tuple[FramePrefix, bytes] | None:
        """Send the pieces of an open push as they come. Return the answer if it is refused."""
        first = next(frames)
        assert first.header is not None
        self.send([encode_frame(FrameKind.EXCHANGE, first.header.SerializeToString())])
        answer = self.next_frame(None)
        if answer[0].kind is not FrameKind.GO:
            return answer
        for frame in frames:
            if frame.header is not None:
                self.send([encode_frame(FrameKind.CLOSE, frame.header.SerializeToString())])
                return None
            prefix = encode_frame(FrameKind.DATA, b"", frame.data.nbytes, frame.offset)
            self.send([prefix, frame.data], receiver.on_frame)
        raise PSError("the push was given up")

    def _receive_data(
        self,
        prefix: FramePrefix,
        result: ps.ExchangeResult,
        receiver: AnswerReceiver,
        in_memory: bool,
    ) -> None:
        views = receiver.begin(result)
        if in_memory:
            receiver.record_bytes(result.nbytes)
            return
        expected = 0
        for view in views if prefix.data_nbytes else ():
            expected += view.nbytes
        if prefix.data_nbytes != expected:
            raise PSError(f"the server sent {prefix.data_nbytes} bytes instead of {expected}")
        if expected:

            def record(nbytes: int) -> None:
                receiver.on_frame()
                receiver.record_bytes(nbytes)

            self.receive(views, record)
