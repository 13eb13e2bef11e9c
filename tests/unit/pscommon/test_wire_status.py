"""Errors keep their type over a real connection; other failures get a name and an address."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from pscommon.core.errors import (
    REASONS,
    AuthenticationError,
    MismatchError,
    PSError,
    UnreachableError,
    error_for,
)
from pscommon.wire import status
from pscommon.wire.endpoint import SERVER_OPTIONS, Endpoint, open_channel
from psproto.v1 import parameter_server_pb2 as pb
from psproto.v1.parameter_server_pb2_grpc import ParameterServerServiceStub
from tests.support.parameter_server_service import add_parameter_server_to_server

WHO = "shard 1 at 127.0.0.1:1 (Describe)"


class Failing:
    """Parameter server that fails in the way that the attribute `how` selects."""

    def __init__(self) -> None:
        self.how: Callable[[grpc.ServicerContext], None] = lambda context: None

    def Describe(
        self, request: pb.DescribeRequest, context: grpc.ServicerContext
    ) -> pb.DescribeResponse:
        with status.answering(context):
            self.how(context)
        return pb.DescribeResponse()

    def Introduce(
        self, request: pb.IntroduceRequest, context: grpc.ServicerContext
    ) -> pb.IntroduceResponse:
        return pb.IntroduceResponse()

    def ExchangeOnce(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        with status.answering(context):
            self.how(context)
        return request

    def Exchange(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        with status.answering(context):
            self.how(context)
            yield from frames


@pytest.fixture
def failing() -> Failing:
    return Failing()


@pytest.fixture
def stub(failing: Failing) -> Iterator[ParameterServerServiceStub]:
    server = grpc.server(ThreadPoolExecutor(2), options=SERVER_OPTIONS)
    add_parameter_server_to_server(failing, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with open_channel(Endpoint(f"127.0.0.1:{port}")) as channel:
        yield ParameterServerServiceStub(channel)
    server.stop(None).wait(10)


def failure(stub: ParameterServerServiceStub, timeout: float = 10.0) -> PSError:
    with pytest.raises(PSError) as caught, status.translated(WHO):
        stub.Describe(pb.DescribeRequest(), timeout=timeout)
    return caught.value


def raises(error: BaseException) -> Callable[[grpc.ServicerContext], None]:
    def how(context: grpc.ServicerContext) -> None:
        raise error

    return how


@pytest.mark.parametrize("reason", [reason for reason in REASONS if reason != "INTERNAL"])
def test_every_reason_survives_the_connection(
    reason: str, failing: Failing, stub: ParameterServerServiceStub
) -> None:
    failing.how = raises(error_for(reason, "what, who and what to do: größer"))

    error = failure(stub)

    assert (type(error), error.reason) == (REASONS[reason].error, reason)
    assert str(error) == "what, who and what to do: größer"
    assert isinstance(error.__cause__, grpc.RpcError)
    assert error.__cause__.code().name == REASONS[reason].status  # type: ignore[attr-defined]


@pytest.mark.parametrize("code", ["UNAUTHENTICATED", "PERMISSION_DENIED"])
def test_a_refusal_without_a_reason_is_an_authentication_error(
    code: str, failing: Failing, stub: ParameterServerServiceStub
) -> None:
    """As of a proxy."""
    failing.how = lambda context: context.abort(grpc.StatusCode[code], "no token")

    error = failure(stub)

    assert (type(error), error.reason, error.exit_code) == (AuthenticationError, code, 13)
    assert "no token" in str(error)
    assert not REASONS[code].retryable


@pytest.mark.parametrize("reason", REASONS)
def test_retry_info_comes_with_retryable_errors(reason: str) -> None:
    urls = [
        detail.type_url.rsplit("/")[-1]
        for detail in status.status_of(error_for(reason, "x")).details
    ]

    assert urls == ["google.rpc.ErrorInfo"] + ["google.rpc.RetryInfo"] * REASONS[reason].retryable


def test_an_unexpected_error_is_logged_and_names_server_and_method(
    failing: Failing, stub: ParameterServerServiceStub, caplog: pytest.LogCaptureFixture
) -> None:
    failing.how = raises(ZeroDivisionError("by zero"))

    error = failure(stub)

    assert (type(error), error.reason) == (PSError, "INTERNAL")
    assert WHO in str(error)
    assert "ZeroDivisionError: by zero" in str(error)
    assert "ZeroDivisionError" in caplog.text


def test_a_long_text_is_truncated_and_arrives(
    failing: Failing, stub: ParameterServerServiceStub
) -> None:
    failing.how = raises(MismatchError("ü" * 50_000, "MODEL_MISMATCH"))

    error = failure(stub)

    assert type(error) is MismatchError
    assert str(error).endswith("(44000 more characters)")


def test_another_status_keeps_its_name_and_gets_context(
    failing: Failing, stub: ParameterServerServiceStub
) -> None:
    failing.how = lambda context: context.abort(grpc.StatusCode.DATA_LOSS, "disk on fire")

    error = failure(stub)

    assert type(error) is PSError
    assert str(error) == f"{WHO} failed: DATA_LOSS: disk on fire"


def test_an_overloaded_server_may_be_asked_again(
    failing: Failing, stub: ParameterServerServiceStub
) -> None:
    failing.how = lambda context: context.abort(
        grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls"
    )

    error = failure(stub)

    assert (type(error), error.reason) == (UnreachableError, "UNREACHABLE")
    assert str(error) == f"{WHO} accepts no more calls: too many calls"


def test_a_missing_server_is_unreachable_with_its_address() -> None:
    with open_channel(Endpoint("127.0.0.1:1")) as channel:
        error = failure(ParameterServerServiceStub(channel))

    assert (type(error), error.reason) == (UnreachableError, "UNREACHABLE")
    assert str(error).startswith(f"{WHO} does not answer: ")


def test_a_silent_server_is_unreachable(failing: Failing, stub: ParameterServerServiceStub) -> None:
    release = threading.Event()
    failing.how = lambda context: (release.wait(20) and None) or None
    try:
        error = failure(stub, timeout=0.1)
    finally:
        release.set()

    assert type(error) is UnreachableError
    assert str(error) == f"{WHO} did not answer in time"


def test_another_service_is_a_mismatch() -> None:
    server = grpc.server(ThreadPoolExecutor(1), options=SERVER_OPTIONS)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with open_channel(Endpoint(f"127.0.0.1:{port}")) as channel:
        error = failure(ParameterServerServiceStub(channel))
    server.stop(None).wait(10)

    assert (type(error), error.reason) == (MismatchError, "SHARD_MISMATCH")


def test_an_error_inside_a_stream_survives(
    failing: Failing, stub: ParameterServerServiceStub
) -> None:
    failing.how = raises(error_for("FENCED", "gone on without worker 3"))

    with pytest.raises(PSError) as caught, status.translated(WHO):
        list(stub.Exchange(iter([pb.ExchangeRequest(data=b"x")]), timeout=10))

    assert caught.value.reason == "FENCED"


def test_raw_frames_work_with_the_generated_stub(stub: ParameterServerServiceStub) -> None:
    sent = [pb.ExchangeRequest(data=b"x" * 2_000_000), pb.ExchangeRequest(data=b"y")]

    received = list(stub.Exchange(iter(sent), timeout=10))

    assert [frame.data for frame in received] == [frame.data for frame in sent]


def test_a_second_server_on_a_port_is_refused() -> None:
    first = grpc.server(ThreadPoolExecutor(1), options=SERVER_OPTIONS)
    second = grpc.server(ThreadPoolExecutor(1), options=SERVER_OPTIONS)
    port = first.add_insecure_port("127.0.0.1:0")
    first.start()

    with pytest.raises(RuntimeError):
        second.add_insecure_port(f"127.0.0.1:{port}")

    first.stop(None).wait(10)
