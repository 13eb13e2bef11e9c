"""Each fault of the proxy, observed by plain sockets."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from tests.support.ports import free_port
from tests.support.proxy import Proxy

SECONDS = 10.0
SILENCE = 0.2
"""Long enough that what is not blocked would have come."""


class EchoServer:
    """A server that echoes its input; `ends` counts connections that ended by FIN or by RST."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.ends: list[str] = []
        self.changed = threading.Condition()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._echo, args=(connection,), daemon=True).start()

    def _echo(self, connection: socket.socket) -> None:
        end = "fin"
        with connection:
            try:
                while data := connection.recv(1 << 16):
                    connection.sendall(data)
            except ConnectionError:
                end = "rst"
        with self.changed:
            self.ends.append(end)
            self.changed.notify_all()

    def wait_for_end(self) -> str:
        with self.changed:
            assert self.changed.wait_for(lambda: self.ends, SECONDS), "no connection has ended"
            return self.ends[-1]

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


@pytest.fixture
def echo() -> Iterator[EchoServer]:
    made = EchoServer()
    yield made
    made.close()


Connect = Callable[[], socket.socket]


@pytest.fixture
def proxy(echo: EchoServer) -> Iterator[Proxy]:
    with Proxy(echo.address) as proxy:
        yield proxy


@pytest.fixture
def connect(proxy: Proxy) -> Iterator[Connect]:
    """Yield a function that opens connections to the proxy."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(
            socket.create_connection(("127.0.0.1", proxy.port), SECONDS)
        )


def received(connection: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        piece = connection.recv(nbytes - len(data))
        assert piece, f"the connection ended after {len(data)} bytes"
        data += piece
    return data


def is_silent(connection: socket.socket) -> bool:
    connection.settimeout(SILENCE)
    try:
        connection.recv(1)
    except TimeoutError:
        return True
    finally:
        connection.settimeout(SECONDS)
    return False


def test_all_bytes_pass_in_both_directions(connect: Connect, proxy: Proxy) -> None:
    data, connection = np.random.default_rng(1).bytes(3 << 20), connect()
    sender = threading.Thread(target=connection.sendall, args=(data,))
    sender.start()

    assert received(connection, len(data)) == data
    sender.join()
    assert (proxy.passed("up"), proxy.passed("down")) == (len(data), len(data))


def test_half_close_passes_and_the_other_direction_continues(
    connect: Connect, echo: EchoServer
) -> None:
    connection = connect()
    connection.sendall(b"last words")
    connection.shutdown(socket.SHUT_WR)

    assert received(connection, 10) == b"last words"
    assert connection.recv(1) == b""
    assert echo.wait_for_end() == "fin"


def test_latency_delays_each_direction_and_preserves_order(connect: Connect, proxy: Proxy) -> None:
    connection = connect()
    proxy.latency(0.05, jitter=0.02)
    began = time.monotonic()
    for number in range(20):
        connection.sendall(bytes([number]))
    data = received(connection, 20)
    took = time.monotonic() - began

    assert data == bytes(range(20))
    assert 0.1 <= took < 1.0, "twice the latency, not twenty times"


def test_rate_limits_each_direction(connect: Connect, proxy: Proxy) -> None:
    connection = connect()
    proxy.rate(200_000, "down")
    began = time.monotonic()
    connection.sendall(bytes(60_000))
    received(connection, 60_000)

    assert time.monotonic() - began >= 0.25


def test_slices_arrive_as_separate_pieces(connect: Connect, proxy: Proxy) -> None:
    """The rate makes pieces visible; unsliced pieces would have 100 bytes."""
    connection = connect()
    proxy.slice(7, "down")
    proxy.rate(2_000, "down")
    connection.sendall(bytes(range(200)))
    first = connection.recv(200)

    assert len(first) <= 50
    assert first + received(connection, 200 - len(first)) == bytes(range(200))


def test_the_seed_determines_pieces_and_delays() -> None:
    from tests.support.proxy_line import Conditions

    def draws(seed: str) -> list[object]:
        conditions = Conditions(seed)
        conditions.slice(9)
        conditions.delay(1.0, 0.5)
        return [len(piece) for piece in conditions.pieces(bytes(100))] + [conditions.due(0.0)]

    assert draws("1 up") == draws("1 up")
    assert draws("1 up") != draws("2 up")


@pytest.mark.parametrize("direction", ["up", "down", None])
def test_a_half_open_proxy_delivers_bytes_after_heal(
    direction: str | None, connect: Connect, proxy: Proxy, echo: EchoServer
) -> None:
    connection = connect()
    connection.sendall(b"a")
    received(connection, 1)
    proxy.half_open(direction)
    connection.sendall(b"hello")

    assert is_silent(connection)
    assert proxy.passed("up") == (6 if direction == "down" else 1)
    another = connect()
    another.sendall(b"there")
    assert is_silent(another)
    proxy.heal()
    assert received(connection, 5) == b"hello"
    assert received(another, 5) == b"there"


def test_a_half_open_proxy_hides_the_end_of_a_connection(
    connect: Connect, proxy: Proxy, echo: EchoServer
) -> None:
    connection = connect()
    connection.sendall(b"a")
    received(connection, 1)
    proxy.half_open()
    connection.close()

    with echo.changed:
        assert not echo.changed.wait_for(lambda: echo.ends, SILENCE)
    proxy.heal()
    assert echo.wait_for_end() == "fin"


def test_cut_closes_connections_with_fin(connect: Connect, proxy: Proxy, echo: EchoServer) -> None:
    connection = connect()
    connection.sendall(b"a")
    received(connection, 1)
    proxy.cut()

    assert connection.recv(1) == b""
    assert echo.wait_for_end() == "fin"
    assert proxy.connections == 0
    proxy.half_open()
    half_open = connect()
    half_open.sendall(b"a")
    proxy.cut()
    assert half_open.recv(1) == b""
    proxy.heal()
    again = connect()
    again.sendall(b"b")
    assert received(again, 1) == b"b"


def test_reset_resets_both_sides(connect: Connect, proxy: Proxy, echo: EchoServer) -> None:
    connection = connect()
    connection.sendall(b"a")
    received(connection, 1)
    proxy.reset()

    with pytest.raises(ConnectionResetError):
        connection.recv(1)
    assert echo.wait_for_end() == "rst"


def test_refused_connections_are_accepted_after_heal(connect: Connect, proxy: Proxy) -> None:
    open_one = connect()
    proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        connect()
    open_one.sendall(b"a")

    assert received(open_one, 1) == b"a"
    proxy.heal()
    again = connect()
    again.sendall(b"b")
    assert received(again, 1) == b"b"


def test_connections_to_a_closed_target_are_reset() -> None:
    """The reset may arrive before the client knows that it is connected."""
    with (
        Proxy(f"127.0.0.1:{free_port()}") as proxy,
        pytest.raises(ConnectionResetError),
        socket.create_connection(("127.0.0.1", proxy.port), SECONDS) as connection,
    ):
        connection.recv(1)


def test_a_closed_proxy_leaves_no_connections(echo: EchoServer) -> None:
    with Proxy(echo.address) as proxy:
        connection = socket.create_connection(("127.0.0.1", proxy.port), SECONDS)
        proxy.half_open()
        connection.sendall(b"a")
    with connection:
        assert connection.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", proxy.port), SECONDS)
    assert not [thread for thread in threading.enumerate() if thread.name == f"proxy-{proxy.port}"]
