"""Workers that consist of a socket: a test can have thousands of them."""

import socket
from typing import Any, Self

import numpy as np

from pscommon.core.model_spec import ModelSpec
from pscommon.wire.messages import model_to_proto
from pscommon.wire.stream_format import HEAD_BYTES, MAGIC, FrameKind, decode_prefix, encode_frame
from psproto.v1 import coordinator_pb2 as co
from psproto.v1 import parameter_server_pb2 as ps
from psproto.v1 import stream_pb2
from psproto.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tests.support.wire_calls import sent_by


class LightClient:
    """A worker that consists of a socket."""

    def __init__(self, joined: co.JoinResponse, address: str) -> None:
        """joined: What `join` has returned. address: The server's stream port."""
        self._job, self._worker = joined.job, joined.worker
        hello = stream_pb2.StreamHello(
            format=3, job=joined.job, worker=joined.worker, key=joined.key
        )
        self.greet(address, hello.SerializeToString())
        assert self.answer()[0] is FrameKind.WELCOME

    @classmethod
    def unanswered(cls, address: str, hello: bytes) -> Self:
        """Connect and send a greeting, whose answer is not received yet."""
        client = cls.__new__(cls)
        client.greet(address, hello)
        return client

    def greet(self, address: str, hello: bytes) -> None:
        host, _, port = address.rpartition(":")
        self.sock = socket.create_connection((host, int(port)), 60.0)
        self.sock.sendall(MAGIC + encode_frame(FrameKind.HELLO, hello))
        assert self._receive(len(MAGIC)) == MAGIC

    def push(self, seq: int, floats: int) -> None:
        """Send a small push of ones without waiting for the answer."""
        data = np.ones(floats, np.float32).tobytes()
        self.begin_push(seq, len(data))
        self.sock.sendall(data)

    def begin_push(self, seq: int, nbytes: int, **fields: Any) -> None:
        """Send the header of a push without its data. fields: other values of the header."""
        usual = {"has_data": True, "samples": 1, "pull": ps.PULL_STEP, "wait_ms": 600_000}
        header = ps.PushPullHeader(
            job=self._job, worker=self._worker, seq=seq, **{**usual, **fields}
        )
        self.sock.sendall(encode_frame(FrameKind.EXCHANGE, header.SerializeToString(), nbytes))

    def enter_barrier(self, number: int) -> None:
        """Call a barrier without waiting for the answer."""
        request = co.CollectiveRequest(
            job=self._job, worker=self._worker, number=number, kind="barrier", wait_ms=600_000
        )
        message = stream_pb2.CoordinatorRequest(collective=request).SerializeToString()
        self.sock.sendall(encode_frame(FrameKind.REQUEST, message))

    def answer(self) -> tuple[FrameKind, bytes, bytes]:
        """Return the kind, the message and the data of the next frame that is no sign of life."""
        while True:
            head = bytearray(self._receive(HEAD_BYTES))
            prefix = decode_prefix(head)
            message = prefix.message(head, bytearray(self._receive(prefix.rest_nbytes)))
            data = self._receive(prefix.data_nbytes)
            if prefix.kind is not FrameKind.ALIVE:
                return prefix.kind, message, data

    def _receive(self, nbytes: int) -> bytes:
        found = bytearray()
        while len(found) < nbytes:
            part = self.sock.recv(nbytes - len(found))
            assert part, "the server has closed the connection"
            found += part
        return bytes(found)


def join(stub: CoordinatorServiceStub, job: str, model: ModelSpec) -> co.JoinResponse:
    """Join and register; return the answer to the first."""
    joined = stub.Join(co.JoinRequest(format=3, job=job), timeout=60)
    request = co.RegisterRequest(job=job, worker=joined.worker, model=model_to_proto(model))
    answer = stub.Register(request, timeout=60, metadata=sent_by(joined.key))
    assert answer.state == co.RegisterResponse.STATE_READY
    return joined
