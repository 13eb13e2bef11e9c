"""Streams for requests to the coordinator, with fake connections."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pscommon.core.errors import UnreachableError
from psproto.v1 import stream_pb2
from psworker.transport.socket_connection import SocketConnection
from psworker.transport.socket_pool import RETRY_SECONDS, RequestSockets


class FakeStream:
    """A connection of which only the address matters."""

    is_broken = is_closed = False
    hello = stream_pb2.StreamHello()

    def __init__(self, address: str) -> None:
        self.address = address

    def cancel(self) -> None:
        self.is_broken = True

    def close(self) -> None:
        self.is_closed = True


def exchanges_of(address: str) -> SocketConnection:
    return cast(Any, SimpleNamespace(address=address, hello=stream_pb2.StreamHello()))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the addresses of the streams that were opened; b refuses."""
    addresses: list[str] = []

    def open_stream(address: str, *arguments: object) -> Any:
        addresses.append(address)
        if address == "b":
            raise UnreachableError("refused")
        return FakeStream(address)

    monkeypatch.setattr(SocketConnection, "open", open_stream)
    return addresses


def test_a_stream_is_used_again_for_its_own_server_only(opened: list[str]) -> None:
    streams = RequestSockets()
    for address in ("a", "a", "c", "a", "c"):
        with streams.borrowed(exchanges_of(address), address) as stream:
            assert stream is not None
            assert stream.address == address

    assert opened == ["a", "c"]


def test_a_server_that_refuses_does_not_delay_another_one(opened: list[str]) -> None:
    streams = RequestSockets()
    for address, is_open in (("b", False), ("a", True), ("b", False)):
        with streams.borrowed(exchanges_of(address), address) as stream:
            assert (stream is not None) == is_open

    assert opened == ["b", "a"]


def test_a_server_that_refused_is_asked_again_after_a_while(
    opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("psworker.transport.socket_pool.time", clock)
    streams = RequestSockets()
    for seconds, attempts in ((0.0, 1), (RETRY_SECONDS - 0.1, 1), (RETRY_SECONDS, 2)):
        clock.now = 100.0 + seconds
        with streams.borrowed(exchanges_of("b"), "server") as stream:
            assert stream is None
        assert opened == ["b"] * attempts

    clock.now += RETRY_SECONDS
    with streams.borrowed(exchanges_of("a"), "server") as stream:
        assert stream is not None


def test_all_streams_of_a_server_are_closed_also_to_its_earlier_address(opened: list[str]) -> None:
    """A server that was restarted has another Unix socket."""
    streams, found = RequestSockets(), []
    with (
        streams.borrowed(exchanges_of("a"), "server") as used,
        streams.borrowed(exchanges_of("a"), "server") as idle,
    ):
        found += [used, idle]
    with streams.borrowed(exchanges_of("c"), "server") as used:
        assert [each.is_closed for each in cast(Any, found)] == [True, True]
        streams.drop("server")
        assert cast(Any, used).is_broken
        found.append(used)

    assert [each.is_closed for each in cast(Any, found)] == [True] * 3
    assert opened == ["a", "a", "c"]
