"""The stream port of a standby: open from its start, and the same after a failover."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pscommon.core.errors import TakenError, UnreachableError
from pscommon.wire.blocking_socket import BlockingSocket
from psproto.v1.stream_pb2 import StreamHello
from psserver.process.config import ServerConfig
from psserver.roles.standby import build_standby
from psserver.stream.stream_port import StreamPort

Start = Callable[..., StreamPort]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as resources:
        yield resources


@pytest.fixture
def started(stack: ExitStack) -> Start:
    """Return a function that starts a standby, and returns its stream port."""

    def start(**settings: Any) -> StreamPort:
        config = ServerConfig(bind="127.0.0.1:0", standby_of="127.0.0.1:1", **settings)
        standby, port = build_standby(config, stack)
        stack.callback(standby._grpc.stop, None)
        return port

    return start


def test_a_standby_names_its_primary_over_streams(started: Start) -> None:
    port = started(lanes="auto")

    for address in (port.address, port.path):
        with pytest.raises(UnreachableError, match=r"standby; its primary is 127\.0\.0\.1:1") as no:
            BlockingSocket.open(address, StreamHello(), "shard 0")
        assert no.value.reason == "NOT_PRIMARY"
    Path(port.path).stat()


def test_a_requested_stream_port_that_is_taken_ends_a_standby_at_its_start(
    stack: ExitStack, started: Start
) -> None:
    taken = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    bind = f"127.0.0.1:{taken.getsockname()[1]}"

    with pytest.raises(TakenError, match=f"cannot listen on {bind} for streams.*Try: ") as no:
        started(stream_bind=bind)
    assert no.value.exit_code == 10


@pytest.mark.parametrize(("lanes", "has"), [("grpc", (0, 0)), ("shm", (0, 1)), ("stream", (1, 0))])
def test_a_standby_opens_what_its_lanes_allow(
    started: Start, lanes: str, has: tuple[int, int]
) -> None:
    port = started(lanes=lanes)

    assert (bool(port.address), bool(port.path)) == has
