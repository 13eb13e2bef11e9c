"""Servers with tokens: which role may send which request, over gRPC and in a stream's greeting."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pscommon.core.errors import AuthenticationError
from pscommon.core.formats import spoken_format
from pscommon.security.credentials import Credentials, use_credentials
from pscommon.security.tokens import ROLES, Role, TokenFile, includes
from pscommon.wire.blocking_socket import BlockingSocket
from pscommon.wire.endpoint import Endpoint, open_channel
from pscommon.wire.requests import (
    COLLECTIVE,
    REQUESTS,
    RESHARD,
    SCALE_WORKERS,
    TOKEN_KEY,
    AnyRequest,
)
from pscommon.wire.status import translated
from psproto.v1 import coordinator_pb2 as co
from psproto.v1 import stream_pb2
from psserver.process.config import ServerConfig
from psserver.process.handlers import grpc_handler
from psserver.server import Server
from psworker import Client

TOKENS: dict[Role, str] = {role: f"{role}-0123456789abcdef" for role in ROLES}
READER = f"Bearer {TOKENS['read']}"
UNKNOWN = "unknown-0123456789ab"
PRESENTED: dict[str, Role | None] = {
    **{f"Bearer {token}": role for role, token in TOKENS.items()},
    "": None,
    "Bearer ": None,
    f"Bearer {UNKNOWN}": None,
    TOKENS["admin"][:-1]: None,
}
SMALLEST = {
    COLLECTIVE: co.CollectiveRequest(number=1).SerializeToString(),
    RESHARD: co.ReshardRequest(shards=1).SerializeToString(),
    SCALE_WORKERS: co.ScaleWorkersRequest(workers=1).SerializeToString(),
}
"""Requests that are out of range without a number; all others may be empty."""


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text("".join(f"{role} {token}\n" for role, token in TOKENS.items()))
    path.chmod(0o600)
    return path


@pytest.fixture
def with_tokens(token_file: Path) -> Iterator[None]:
    """Give this process all tokens."""
    use_credentials(Credentials(tokens=TokenFile(token_file).tokens))
    yield
    use_credentials(None)


class Answering:
    """Handlers of all requests, which record that they were called."""

    def __init__(self) -> None:
        self.called: list[AnyRequest] = []
        self.handlers: dict[AnyRequest, Any] = {row: self._handler(row) for row in REQUESTS}

    def _handler(self, row: AnyRequest) -> Any:
        async def waiting(message: object, waiter: object) -> Any:
            self.called.append(row)
            return row.response()

        def unary(message: object, context: object = None) -> Any:
            self.called.append(row)
            return b"" if row.is_framed else row.response()

        def stream(messages: object, context: object) -> Iterator[Any]:
            yield unary(messages)

        if row.kind != "unary_unary":
            return stream
        return waiting if row.may_wait and not row.is_framed else unary


@pytest.fixture
def answering(with_tokens: None) -> Iterator[tuple[grpc.Channel, Answering]]:
    found = Answering()
    server = grpc.server(ThreadPoolExecutor(4), handlers=[grpc_handler(found.handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel, found
    finally:
        server.stop(0).wait()


def send(channel: grpc.Channel, row: AnyRequest, presented: str) -> None:
    metadata = ((TOKEN_KEY, presented),) if presented else ()
    call = getattr(channel, row.kind)(row.path)
    raw = SMALLEST.get(row, b"")
    message = raw if row.kind.startswith("unary") else iter([raw])
    with translated("the server"):
        answer = call(message, timeout=10, metadata=metadata)
        if row.kind.endswith("stream"):
            list(answer)


def test_each_request_needs_its_role(answering: tuple[grpc.Channel, Answering]) -> None:
    channel, found = answering
    for row in REQUESTS:
        for presented, role in PRESENTED.items():
            found.called.clear()
            if role is not None and includes(role, row.role):
                send(channel, row, presented)
                assert found.called == [row]
                continue
            with pytest.raises(AuthenticationError) as refused:
                send(channel, row, presented)
            expected = "UNAUTHENTICATED" if role is None else "PERMISSION_DENIED"
            assert refused.value.reason == expected, (row, presented)
            assert not found.called
            assert not any(token in str(refused.value) for token in TOKENS.values())


def test_a_call_without_a_role_is_refused_before_its_message_is_received(
    answering: tuple[grpc.Channel, Answering],
) -> None:
    """Strangers could fill the memory with large messages."""
    channel, _ = answering
    is_over = threading.Event()

    def messages() -> Iterator[bytes]:
        is_over.wait()
        yield b""

    try:
        for row in REQUESTS:
            with pytest.raises(AuthenticationError), translated("the server"):
                channel.stream_unary(row.path)(messages(), timeout=10)
    finally:
        is_over.set()


def test_a_new_token_file_is_used_without_a_restart(
    token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pscommon.security.tokens.CHECK_SECONDS", 0.0)
    use_credentials(Credentials(tokens=TokenFile(token_file).tokens))
    server = Server(ServerConfig(bind="127.0.0.1:0"))
    server.start()
    try:
        greet(server, TOKENS["worker"])
        token_file.write_text("worker another-0123456789ab\n")

        greet(server, "another-0123456789ab")
        with pytest.raises(AuthenticationError, match="does not know the token"):
            greet(server, TOKENS["worker"])
    finally:
        server.stop("test")
        server.close()
        use_credentials(None)


@pytest.fixture
def server(with_tokens: None) -> Iterator[Server]:
    server = Server(ServerConfig(bind="127.0.0.1:0"))
    server.start()
    yield server
    server.stop("test")
    server.close()


def greet(server: Server, token: str, purpose: Any = 0) -> None:
    hello = stream_pb2.StreamHello(
        format=spoken_format(), job=server.identity.job, purpose=purpose, token=token
    )
    BlockingSocket.open(server.identity.stream_address, hello, "the server").close()


@pytest.mark.parametrize("role", [*ROLES, None])
def test_a_greeting_needs_the_role_of_its_purpose(server: Server, role: Role | None) -> None:
    purposes: dict[Any, Role] = {
        stream_pb2.StreamHello.PURPOSE_UNSPECIFIED: "worker",
        stream_pb2.StreamHello.PURPOSE_REQUESTS: "worker",
        stream_pb2.StreamHello.PURPOSE_SHARD: "server",
    }
    for purpose, needed in purposes.items():
        if role is not None and includes(role, needed):
            greet(server, TOKENS[role], purpose)
        else:
            with pytest.raises(AuthenticationError):
                greet(server, TOKENS[role] if role else UNKNOWN, purpose)


def test_health_needs_no_token_and_reflection_that_of_a_reader(server: Server) -> None:
    with open_channel(Endpoint(server.address)) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=10).status == 1
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        with pytest.raises(grpc.RpcError) as refused:
            list(reflection(iter([asked]), timeout=10))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        metadata = ((TOKEN_KEY, f"Bearer {TOKENS['read']}"),)
        assert list(reflection(iter([asked]), timeout=10, metadata=metadata))


def test_health_without_a_token_takes_neither_memory_nor_a_call(server: Server) -> None:
    is_over = threading.Event()

    def messages() -> Iterator[bytes]:
        is_over.wait()
        yield b""

    with open_channel(Endpoint(server.address)) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        named, metadata = health_pb2.HealthCheckRequest(service="no such"), ((TOKEN_KEY, READER),)
        try:
            answer = channel.stream_unary("/grpc.health.v1.Health/Check")(messages(), timeout=10)
            assert health_pb2.HealthCheckResponse.FromString(answer).status == 1
        finally:
            is_over.set()
        with pytest.raises(grpc.RpcError) as refused:
            next(health.Watch(named, timeout=10))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        watched = health.Watch(health_pb2.HealthCheckRequest(), timeout=10, metadata=metadata)
        assert next(watched).status == 1
        watched.cancel()
        with pytest.raises(grpc.RpcError) as unknown:
            health.Check(named, timeout=10, metadata=metadata)
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_client_sends_the_tokens_of_its_process(server: Server, token_file: Path) -> None:
    with Client(server.address):
        pass
    token_file.write_text(f"read {TOKENS['read']}\n")
    use_credentials(Credentials(tokens=TokenFile(token_file).tokens))
    with pytest.raises(AuthenticationError, match="role worker"):
        Client(server.address)
