"""The time in which a stream is found, and the reason for none, with fake connections."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from pscommon.core.errors import InvalidRequestError, UnreachableError
from pscommon.wire.blocking_socket import CONNECT_SECONDS
from psproto.v1 import parameter_server_pb2 as ps
from psworker.transport.socket_connection import SocketConnection
from psworker.transport.socket_pool import SocketPool

TIMEOUT = 60.0


def test_the_description_and_all_ways_to_a_server_share_one_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The description takes 0.5 s, and no way answers in its time."""
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("psworker.transport.socket_pool.time", clock)
    (tmp_path / "socket").touch()
    limits: list[float] = []

    def describe(request: ps.DescribeRequest, timeout: float) -> ps.DescribeResponse:
        assert timeout == CONNECT_SECONDS
        clock.now += 0.5
        return ps.DescribeResponse(
            format=3, addresses=["a:1"], stream_path=str(tmp_path / "socket"), stream_address="a:2"
        )

    def open_stream(address: str, hello: object, server: str, seconds: float) -> Any:
        limits.append(seconds)
        clock.now += seconds
        raise UnreachableError("refused")

    monkeypatch.setattr(SocketConnection, "open", open_stream)
    header = ps.PushPullHeader(worker=1)

    assert SocketPool("auto", {}).find(0, "a:1", header, describe, TIMEOUT) is None
    assert limits == [0.75, 0.75]
    assert clock.now == 100.0 + CONNECT_SECONDS


@pytest.mark.parametrize(
    ("features", "why"), [(["shm"], "it offers shm"), ([], "it is of an old release")]
)
def test_the_reason_for_no_stream_names_what_the_server_offers(
    features: list[str], why: str
) -> None:
    def describe(request: ps.DescribeRequest, timeout: float) -> ps.DescribeResponse:
        return ps.DescribeResponse(format=3, addresses=["a:1"], features=features)

    with pytest.raises(InvalidRequestError, match=f"{why}. Try: `--lanes auto`"):
        SocketPool("stream", {}).find(0, "a:1", ps.PushPullHeader(worker=1), describe, TIMEOUT)


def test_a_worker_with_grpc_only_has_no_path_for_memory() -> None:
    header = ps.PushPullHeader(worker=1)
    with pytest.raises(InvalidRequestError, match="gRPC only"):
        SocketPool("grpc", {}).find_path(0, "a:1", header, Mock(), TIMEOUT)
