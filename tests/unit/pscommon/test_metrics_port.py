"""The metrics port with slow, silent and malicious peers, with TLS, and at the end of a process."""

import resource
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from http.client import HTTPSConnection
from pathlib import Path
from urllib.request import urlopen

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import Gauge, Metric
from prometheus_client.registry import Collector

from pscommon.security.credentials import Credentials, use_credentials
from pscommon.security.tokens import Tokens
from pscommon.telemetry.http import MAX_CONNECTIONS_COUNT, new_registry
from pscommon.wire.metrics_port import serve_metrics
from tests.support.events import events
from tests.support.machine_time import machine_seconds
from tests.support.metrics_port import (
    SECONDS,
    Probe,
    browser_context,
    ended,
    many,
    read_all,
    server_tls,
)
from tests.support.proxy import NO_LINGER

SILENT_COUNT = 1000
LIVEZ = b"GET /livez HTTP/1.1\r\nConnection: close\r\n\r\n"


@pytest.fixture
def probe() -> Iterator[Probe]:
    probe = Probe()
    with closing(probe.monitor):
        yield probe


@pytest.fixture
def open_files() -> Iterator[None]:
    """Permit both ends of SILENT_COUNT connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * SILENT_COUNT + 500
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"the limit of open files is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Slow(Collector):
    """A metric whose scrape waits for the test."""

    def __init__(self) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        self.began.set()
        assert self.may_end.wait(SECONDS)
        yield Metric("ps_slow", "slow", "gauge")


@pytest.mark.timing
@pytest.mark.parametrize("has_tls", [False, True])
def test_livez_answers_beside_silent_connections(
    has_tls: bool, tmp_path: Path, open_files: None
) -> None:
    """With TLS they are silent before their handshakes."""
    probe = Probe(tls=server_tls(tmp_path).https_context if has_tls else None)
    client = browser_context(tmp_path) if has_tls else None
    scheme = "https" if has_tls else "http"
    with closing(probe.monitor), many(probe, SILENT_COUNT) as silent:

        def ask() -> float:
            began = time.monotonic()
            url = f"{scheme}://{probe.monitor.address}/livez"
            with urlopen(url, timeout=SECONDS, context=client) as answer:
                assert answer.status == 200
            return machine_seconds(began)

        ask()  # behind the others in the queue of the kernel
        assert max(ask() for _ in range(5)) < 1.0

        # the oldest were closed
        is_open = [not ended(sock) for sock in silent]
        assert is_open == sorted(is_open)
        assert 0 < sum(is_open) <= MAX_CONNECTIONS_COUNT


def test_a_scrape_is_not_closed_for_another_connection(probe: Probe) -> None:
    """Only connections whose peer the port waits for."""
    slow = Slow()
    probe.registry.register(slow)
    with probe.connect() as scrape:
        scrape.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert slow.began.wait(SECONDS)
        with many(probe, MAX_CONNECTIONS_COUNT + 5):
            assert probe.send(LIVEZ).startswith(b"HTTP/1.1 200 ")  # even during the scrape
            slow.may_end.set()

            assert b"ps_slow" in read_all(scrape)


def test_a_request_ends_at_its_limit() -> None:
    """A connection that says nothing, and one whose next byte is always due."""
    probe = Probe(request_seconds=0.3)
    with closing(probe.monitor), probe.connect() as silent, probe.connect() as slow:
        slow.sendall(LIVEZ[:-1])
        slow.settimeout(0.05)
        received = None
        while received != b"":
            try:
                received = slow.recv(1)
                assert not received
            except TimeoutError:
                slow.sendall(b"a")
            except ConnectionError:
                break

        assert read_all(silent) == b""


def test_a_peer_that_reads_nothing_is_closed() -> None:
    """Its answers would fill the memory. They are larger than the buffers of the kernel."""
    probe = Probe(request_seconds=0.3)
    Gauge("ps_large", "a" * 1_000_000, registry=probe.registry)
    requests = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50
    with closing(probe.monitor), probe.connect() as sock, pytest.raises(ConnectionError):
        sock.sendall(requests + bytes(30_000_000))


def test_an_idle_connection_has_the_limit_after_each_answer() -> None:
    probe = Probe(request_seconds=1.0)
    with closing(probe.monitor), probe.connect() as sock:
        sock.sendall(b"GET /livez HTTP/1.1\r\n\r\n")

        assert read_all(sock).startswith(b"HTTP/1.1 200 ")


METHODS = st.sampled_from(["GET", "HEAD", "POST", "OPTIONS", "get", "PRI", ""])
TARGETS = st.sampled_from(["/", "/livez", "/readyz", "/metrics", "*", "//", "/metrics?name[]=%FF"])
VERSIONS = st.sampled_from(["HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "http/1.1", ""])
NAMES = st.sampled_from(
    ["Host", "Accept", "Accept-Encoding", "Authorization", "Content-Length", "Connection", ""]
)
VALUES = st.one_of(
    st.sampled_from(["localhost", "gzip", "Basic Og==", "Bearer ", "7", "close"]),
    st.from_regex(
        r"\A(text/plain|application/openmetrics-text); ?version=.*",
        alphabet=st.characters(max_codepoint=255),
    ),
    st.text(st.characters(max_codepoint=255), max_size=40),
)
HEADS = st.builds(
    lambda start, headers, end: (
        " ".join(start) + "\r\n" + "".join(f"{n}: {v}\r\n" for n, v in headers) + end
    ).encode("latin-1"),
    st.tuples(METHODS, TARGETS, VERSIONS),
    st.lists(st.tuples(NAMES, VALUES), max_size=4),
    st.sampled_from(["\r\n", "\n", ""]),
)
BYTES = st.lists(st.one_of(HEADS, st.binary(max_size=100)), min_size=1, max_size=3).map(b"".join)
STATUSES = {"200", "400", "403", "404", "405"}


@pytest.mark.parametrize("is_remote", [False, True])
def test_any_bytes_get_answers_or_the_end(
    is_remote: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pscommon.telemetry.http.is_loopback", lambda _: not is_remote)
    probe = Probe(authorize=lambda token: token == "7")
    statuses = STATUSES | {"401"} if is_remote else STATUSES
    with closing(probe.monitor):

        @settings(max_examples=200)
        @given(BYTES)
        def send(sent: bytes) -> None:
            received = probe.send(sent)
            assert not received or received[:9] == b"HTTP/1.1 "
            assert received[9:12].decode() in {*statuses, ""}

        send()
        assert probe.send(LIVEZ).startswith(b"HTTP/1.1 200 ")
    assert not events(caplog)


def test_any_bytes_instead_of_a_handshake_end_the_connection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Plain HTTP too; the log says it once."""
    probe = Probe(tls=server_tls(tmp_path).https_context)
    with closing(probe.monitor):

        @settings(max_examples=50)
        @given(st.one_of(BYTES, st.binary(max_size=60).map(lambda tail: b"\x16\x03\x01" + tail)))
        def send(sent: bytes) -> None:
            assert b"HTTP" not in probe.send(sent)

        send()
        probe.send(LIVEZ)
        client = browser_context(tmp_path)
        with client.wrap_socket(probe.connect(), server_hostname="127.0.0.1") as sock:
            sock.sendall(LIVEZ)
            assert read_all(sock).startswith(b"HTTP/1.1 200 ")
    assert set(events(caplog)) == {"http_request_failed"}
    assert len(events(caplog)) < 3
    assert all(record.exc_info is None for record in caplog.records)


def test_a_large_answer_fits_through_a_slow_connection(tmp_path: Path) -> None:
    """It is larger than the buffers of the kernel: TLS waits until the socket takes more."""
    probe = Probe(tls=server_tls(tmp_path).https_context)
    Gauge("ps_large", "a" * 12_000_000, registry=probe.registry)
    client = browser_context(tmp_path)
    with (
        closing(probe.monitor),
        client.wrap_socket(probe.connect(), server_hostname="127.0.0.1") as sock,
    ):
        sock.sendall(b"GET /metrics?name[]=ps_large HTTP/1.0\r\n\r\n")

        assert read_all(sock).count(b"a") > 12_000_000


def test_a_peer_that_leaves_a_handshake_is_not_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A probe of a load balancer connects, and ends the connection."""
    probe = Probe(tls=server_tls(tmp_path).https_context)
    with closing(probe.monitor):
        for sent in (b"", b"\x16\x03\x01"):
            assert b"HTTP" not in probe.send(sent)
        with probe.connect() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        client = browser_context(tmp_path)
        with client.wrap_socket(probe.connect(), server_hostname="127.0.0.1") as sock:
            sock.sendall(LIVEZ)  # the connections before are served
            assert read_all(sock).startswith(b"HTTP/1.1 200 ")
    assert not events(caplog)


def test_new_connections_use_the_present_certificate(tmp_path: Path) -> None:
    """A rotated certificate needs no restart; open connections stay."""
    contexts = [server_tls(tmp_path / "old").https_context()]
    probe = Probe(tls=lambda: contexts[-1])

    def connect(name: str) -> ssl.SSLSocket:
        client = browser_context(tmp_path / name)
        return client.wrap_socket(probe.connect(), server_hostname="127.0.0.1")

    with closing(probe.monitor), connect("old") as old:
        contexts.append(server_tls(tmp_path / "new").https_context())
        with connect("new") as new:
            for sock in (old, new):
                sock.sendall(LIVEZ)
                assert b"alive" in read_all(sock)
        with pytest.raises(ssl.SSLCertVerificationError):
            connect("old")


@pytest.fixture
def with_credentials(tmp_path: Path) -> Iterator[None]:
    """Give this process certificates and tokens."""
    tokens: Tokens = (("worker", "a worker's token"), ("read", "a reader's token"))
    use_credentials(Credentials(server_tls(tmp_path), lambda: tokens))
    yield
    use_credentials(None)


@pytest.mark.parametrize(
    ("token", "status"),
    [("a reader's token", 200), ("a worker's token", 200), ("no token", 401), ("", 401)],
)
def test_the_port_of_a_process_uses_its_credentials(
    token: str,
    status: int,
    with_credentials: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It asks for no client certificate; every role may read."""
    monkeypatch.setattr("pscommon.telemetry.http.is_loopback", lambda _: False)
    with closing(serve_metrics("127.0.0.1:0", new_registry(), lambda: (True, "ready"))) as monitor:
        for path, expected in (("/livez", 200), ("/metrics", status)):
            connection = HTTPSConnection(monitor.address, context=browser_context(tmp_path))
            with closing(connection):
                connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
                assert connection.getresponse().status == expected


def test_a_context_that_cannot_be_loaded_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> ssl.SSLContext:
        raise FileNotFoundError("server.pem")

    probe = Probe(tls=fail)
    with closing(probe.monitor):
        assert probe.send(LIVEZ) == b""
    assert events(caplog) == ["http_request_failed"]


def test_close_waits_for_no_connection(tmp_path: Path) -> None:
    """Idle ones, handshakes, and a scrape that is under way or waits for its turn."""
    before = set(threading.enumerate())
    plain, secret = Probe(), Probe(tls=server_tls(tmp_path).https_context)
    slow = Slow()
    plain.registry.register(slow)
    with ExitStack() as connections:
        idle, handshake, *scrapes = (
            connections.enter_context(probe.connect()) for probe in (plain, secret, plain, plain)
        )
        idle.sendall(b"GET /livez HTTP/1.1\r\n\r\n")
        for scrape in scrapes:
            scrape.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert slow.began.wait(SECONDS)
        handshake.sendall(b"\x16")
        with ThreadPoolExecutor() as pool:
            closed = [pool.submit(probe.monitor.close) for probe in (plain, secret)]
            closed[1].result(SECONDS)
            slow.may_end.set()
            closed[0].result(SECONDS)

        assert set(threading.enumerate()) <= before
        assert all(read_all(sock) == b"" for sock in (handshake, *scrapes))
        assert read_all(idle).endswith(b"alive\n")


PROCESS = """
import os, socket, sys
from pscommon.telemetry.http import MetricsServer, new_registry

listening = socket.create_server(("127.0.0.1", 0))
server = MetricsServer(
    listening, new_registry(), lambda: (True, "ready"), request_seconds=float(sys.argv[1])
)
clients = [socket.create_connection(listening.getsockname()) for _ in range(3)]
for client in clients[1:]:
    client.sendall(b"GET /metrics HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
    client.recv(1)
reader, writer = os.pipe()
child = os.fork()
if not child:
    os.close(writer)
    for client in clients:
        client.close()
    if os.fork():
        server.close()  # its own copy of the port
        sys.exit(0)
    os.read(reader, 1)  # until the first process ends
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
with socket.create_connection(listening.getsockname()) as client:
    client.sendall(b"GET /livez HTTP/1.0\\r\\n\\r\\n")
    # the second child has no copy of this connection
    while data := client.recv(1000):
        print(data.decode())
if float(sys.argv[1]) < 2:
    # it has copies of these, as the workers of a DataLoader
    for client in clients:
        while client.recv(1000):
            pass
print("end")
"""


@pytest.mark.parametrize("seconds", ["1", "30"])
def test_a_process_forks_and_ends_beside_open_connections(seconds: str) -> None:
    """Nothing is waited for, and stderr stays empty. A child does not keep connections open."""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", PROCESS, seconds],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.stderr == ""
    assert done.stdout.endswith("end\n")
    assert "alive" in done.stdout
