"""Streams over a network that fails: silence, lost connections, and a port that is unreachable."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from pscommon.wire.stream_format import SILENCE_SECONDS
from psworker import Client
from psworker.exchange import shard_exchange
from psworker.transport import socket_pool
from psworker.transport.socket_connection import SocketConnection
from tests.support.cluster import Cluster
from tests.support.events import records_of
from tests.support.machine_time import machine_seconds
from tests.support.ports import free_port
from tests.support.proxy import Proxy
from tests.support.stream_training import streams_of
from tests.support.workers import count, counted, counter, until

Make = Callable[..., Cluster]

SPARE_SECONDS = 1.0
PATIENT = 60.0
"""A lease that outlasts each fault of this module."""


class ProxiedServer(NamedTuple):
    """A server whose stream port workers reach through a proxy, and its gRPC port directly."""

    cluster: Cluster
    proxy: Proxy

    @property
    def address(self) -> str:
        return self.cluster.address

    def has_staged(self) -> bool:
        """Return whether a push waits for those of other workers."""
        return bool(self.cluster.servers[0].engine.live.state.staged)


@pytest.fixture
def proxied(cluster: Make, caplog: pytest.LogCaptureFixture) -> Iterator[ProxiedServer]:
    caplog.set_level(logging.INFO, "psworker")
    bind = f"127.0.0.1:{free_port()}"
    with Proxy(bind) as proxy:
        streams = {"stream_bind": bind, "advertise_stream": proxy.address}
        yield ProxiedServer(cluster(1, lanes="stream", lease=PATIENT, **streams), proxy)


def stream_of(client: Client) -> SocketConnection | None:
    """Return the open stream of the client's exchanges."""
    return next(iter(streams_of(client)), None)


@contextmanager
def waiting_push(server: ProxiedServer, client: Client) -> Iterator[SocketConnection]:
    """Let a push wait for another worker in this context, where it is the only one."""
    pushing = threading.Thread(target=count, args=(client,))
    pushing.start()
    until(server.has_staged, "a push that waits")
    stream = stream_of(client)
    assert stream is not None
    yield stream
    pushing.join(PATIENT)
    assert not pushing.is_alive()


# ---- silence -------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.timing
def test_a_silent_server_is_noticed_while_a_push_waits(
    proxied: ProxiedServer, caplog: pytest.LogCaptureFixture
) -> None:
    """After 4 s the worker gives the stream up. No other stream is possible, so it goes on over
    gRPC.
    """
    with (
        counter(proxied.address, lanes="auto") as client,
        counter(proxied.address, lanes="grpc") as other,
    ):
        with waiting_push(proxied, client) as stream:
            began = time.monotonic()
            proxied.proxy.half_open()
            until(lambda: stream.is_broken, "a broken stream")
            noticed = machine_seconds(began)
            until(lambda: len(records_of(caplog, "lanes_chosen")) == 2, "another lane")
            moved = machine_seconds(began)
            count(other)

        print(f"\na silent stream: noticed after {noticed:.1f} s, gRPC after {moved:.1f} s")
        assert noticed <= SILENCE_SECONDS + SPARE_SECONDS
        assert moved <= SILENCE_SECONDS + socket_pool.CONNECT_SECONDS + 2 * SPARE_SECONDS
        assert "grpc=[0]" in records_of(caplog, "lanes_chosen")[1].getMessage()
        assert "tcp=[0]" in records_of(caplog, "lanes_chosen")[0].getMessage()
        assert counted(other.pull()) == counted(client.pull()) == 1
    assert not records_of(caplog, "membership_lost")


@pytest.mark.full
def test_a_wait_longer_than_the_silence_is_no_silence(
    proxied: ProxiedServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server says every second that it works on the answer to one long exchange."""
    monkeypatch.setattr(shard_exchange, "SLICE_SECONDS", 4 * SILENCE_SECONDS)
    made: list[float] = []
    exchange = SocketConnection.exchange

    def counted_exchange(self: SocketConnection, *arguments: object) -> object:
        made.append(time.monotonic())
        return exchange(self, *arguments)  # type: ignore[arg-type]

    options = {"lanes": "stream", "connect_timeout": 12 * SILENCE_SECONDS}
    with counter(proxied.address, **options) as client, counter(proxied.address) as other:
        monkeypatch.setattr(SocketConnection, "exchange", counted_exchange)
        with waiting_push(proxied, client) as stream:
            waits = time.monotonic() + SILENCE_SECONDS + 1.5
            until(lambda: time.monotonic() > waits, "a wait longer than the silence")
            assert len(made) == 1
            monkeypatch.setattr(SocketConnection, "exchange", exchange)
            count(other)

        assert len(made) == 1
        assert stream_of(client) is stream
        assert not stream.is_broken
        assert counted(client.pull()) == 1
    assert len(records_of(caplog, "lanes_chosen")) == 2


# ---- lost connections ----------------------------------------------------------------------------


@pytest.mark.parametrize("end", [Proxy.cut, Proxy.reset])
def test_a_push_whose_stream_is_lost_while_it_waits_goes_on_over_another(
    proxied: ProxiedServer, end: Callable[[Proxy], None]
) -> None:
    with (
        counter(proxied.address, lanes="stream") as client,
        counter(proxied.address, lanes="grpc") as other,
    ):
        with waiting_push(proxied, client) as stream:
            end(proxied.proxy)
            until(lambda: stream_of(client) not in (None, stream), "another stream")
            assert proxied.has_staged()
            count(other)

        assert stream.is_broken
        assert counted(client.pull()) == 1


def test_a_port_that_was_unreachable_is_tried_again(
    proxied: ProxiedServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(socket_pool, "RETRY_SECONDS", 0.2)
    proxied.proxy.refuse()
    with counter(proxied.address, lanes="auto") as client:
        count(client)
        assert stream_of(client) is None
        proxied.proxy.heal()

        def is_reached() -> bool:
            count(client)
            return stream_of(client) is not None

        until(is_reached, "a stream")
        count(client)
    before, after = (line.getMessage() for line in records_of(caplog, "lanes_chosen"))
    assert "grpc=[0]" in before
    assert "Connection refused" in before
    assert "tcp=[0]" in after
