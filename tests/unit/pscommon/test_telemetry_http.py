"""Metrics and probes of a process over HTTP, and a port that is not available."""

import gzip
import socket
from base64 import b64encode
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from typing import NamedTuple

import pytest
from prometheus_client import Counter, Metric
from prometheus_client.registry import Collector

from pscommon.core.errors import InvalidRequestError, TakenError
from pscommon.telemetry.http import MetricsServer, new_registry
from pscommon.telemetry.http_request import page_answer
from pscommon.wire.endpoint import Endpoint, listen_http
from tests.support.events import events
from tests.support.metrics_port import Probe, read_all

GZIP = {"Accept-Encoding": "gzip"}


class Answer(NamedTuple):
    status: int
    kind: str
    body: str


def get(address: str, path: str, accept: str = "text/plain", method: str = "GET") -> Answer:
    with closing(HTTPConnection(address, timeout=5)) as connection:
        connection.request(method, path, headers={"Accept": accept})
        response = connection.getresponse()
        return Answer(response.status, response.headers["Content-Type"], response.read().decode())


@pytest.fixture
def probe() -> Iterator[Probe]:
    probe = Probe()
    with closing(probe.monitor):
        yield probe


def test_metrics_include_the_registry_and_the_process(probe: Probe) -> None:
    """Own metrics, process_* and python_* are read for each scrape."""
    steps = Counter("ps_steps", "steps", registry=probe.registry)
    steps.inc()
    get(probe.monitor.address, "/metrics")
    steps.inc()

    lines = get(probe.monitor.address, "/metrics").body.splitlines()

    assert "ps_steps_total 2.0" in lines
    assert any(line.startswith("process_resident_memory_bytes ") for line in lines)
    assert any(line.startswith("python_info{") for line in lines)


def test_metrics_use_openmetrics_if_the_client_accepts_it(probe: Probe) -> None:
    answer = get(
        probe.monitor.address, "/metrics", accept="application/openmetrics-text; version=1.0.0"
    )

    assert answer.kind.startswith("application/openmetrics-text")
    assert answer.body.endswith("# EOF\n")
    assert get(probe.monitor.address, "/metrics").kind.startswith("text/plain")


def test_liveness_does_not_depend_on_readiness(probe: Probe) -> None:
    """A waiting server is alive; an orchestrator would otherwise kill it."""
    probe.state = (False, "waiting for shard 1 of 2")

    assert get(probe.monitor.address, "/livez").status == 200
    assert get(probe.monitor.address, "/readyz").status == 503


def test_readiness_gives_the_reason_in_one_line(probe: Probe) -> None:
    """Both responses carry the reason, whatever white space it contains."""
    assert get(probe.monitor.address, "/readyz")[::2] == (200, "serving version 7\n")

    probe.state = (False, "waiting for\n  shard 1 of 2")

    assert get(probe.monitor.address, "/readyz")[::2] == (503, "waiting for shard 1 of 2\n")


def test_a_probe_may_use_the_head_method(probe: Probe) -> None:
    probe.state = (False, "waiting for shard 1 of 2")

    statuses = [
        get(probe.monitor.address, path, method="HEAD")[::2]
        for path in ("/livez", "/readyz", "/metrics", "/", "/nothing")
    ]

    assert statuses == [(200, ""), (503, ""), (200, ""), (200, ""), (404, "")]


def test_metrics_are_compressed_and_selected_on_request(probe: Probe) -> None:
    """Prometheus compresses; `name[]` selects."""
    Counter("ps_steps", "steps", registry=probe.registry).inc()
    with closing(HTTPConnection(probe.monitor.address, timeout=5)) as connection:
        connection.request("GET", "/metrics?name[]=ps_steps_total", headers=GZIP)
        response = connection.getresponse()
        body = gzip.decompress(response.read()).decode()

    assert response.headers["Content-Encoding"] == "gzip"
    assert "ps_steps_total 1.0" in body.splitlines()
    assert "python_info" not in body


@pytest.mark.parametrize("version", ["x", "1.0.x", "9" * 5000, ""])
def test_an_unusual_version_in_accept_is_answered(probe: Probe, version: str) -> None:
    """prometheus_client compares some of them with a number, and fails."""
    for kind in ("application/openmetrics-text", "text/plain"):
        answer = get(probe.monitor.address, "/metrics", f"{kind}; version={version}")
        assert answer.status == 200


def test_a_connection_serves_several_requests(probe: Probe) -> None:
    """Prometheus keeps its connections; with TLS a new one costs a handshake."""
    with closing(HTTPConnection(probe.monitor.address, timeout=5)) as connection:
        connection.connect()
        used = connection.sock
        for method, path, status in (
            ("GET", "/livez", 200),
            ("HEAD", "/metrics", 200),
            ("GET", "/nothing", 404),
            ("GET", "/metrics", 200),
        ):
            connection.request(method, path)
            with connection.getresponse() as response:
                response.read()
                assert response.status == status
            assert connection.sock is used


def test_requests_may_follow_each_other_before_the_answers(probe: Probe) -> None:
    with probe.connect() as sock:
        sock.sendall(2 * b"GET /livez HTTP/1.1\r\n\r\n" + b"GET /livez HTTP/1.0\r\n\r\n")
        received = read_all(sock)

    assert received.count(b"HTTP/1.1 200 OK\r\n") == 3
    assert received.count(b"Connection: close") == 1


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (("POST /metrics HTTP/1.1", "Host: localhost"), 405),
        (("GET /metrics HTTP/1.1", "Host: attacker.example"), 403),
        (("GET /metrics HTTP/1.1",), 400),
        (("hello",), 400),
        (("GET /livez HTTP/1.1", "A: " + "a" * 16_000), 200),
        (("GET /livez HTTP/1.1", "A: " + "a" * 16_400), 431),
        (("GET /livez HTTP/1.1", *["A: a"] * 4000), 431),
    ],
)
def test_other_requests_are_refused(
    probe: Probe, lines: tuple[str, ...], status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The client learns why. The log does not: otherwise a scanner could fill the disk."""
    assert probe.status(*lines) == status
    assert not events(caplog)


def test_a_client_that_sends_a_body_can_read_the_answer(probe: Probe) -> None:
    """The connection does not end before the client has sent all."""
    with probe.connect() as sock:
        sock.sendall(b"POST /metrics HTTP/1.1\r\nContent-Length: 2000000\r\n\r\n")
        received = sock.recv(9)
        sock.sendall(bytes(2_000_000))

        assert (received + read_all(sock)).startswith(b"HTTP/1.1 405 ")


def test_an_endless_head_is_refused(probe: Probe) -> None:
    """Before its end, which would never come."""
    with probe.connect() as sock:
        sock.sendall(b"GET /livez HTTP/1.1\r\nA: " + b"a" * 20_000)

        assert sock.recv(1000).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Authorization: Bearer secret", 200),
        ("Authorization: Basic " + b64encode(b"prometheus:secret").decode(), 200),
        ("Authorization: Bearer wrong", 401),
        ("Accept: */*", 401),
    ],
)
def test_other_machines_need_a_token(
    header: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address looks like that of another interface; probes need no token."""
    monkeypatch.setattr("pscommon.telemetry.http.is_loopback", lambda _: False)
    probe = Probe(authorize=lambda token: token == "secret")
    with closing(probe.monitor):
        assert probe.status("GET /metrics HTTP/1.1", "Host: server-0:9464", header) == status
        assert probe.status("GET /readyz HTTP/1.1", "Host: server-0:9464") == 200


@pytest.mark.parametrize(("is_insecure", "status"), [(False, 403), (True, 200)])
def test_without_tokens_other_machines_need_the_flag(
    is_insecure: bool, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closed by default."""
    monkeypatch.setattr("pscommon.telemetry.http.is_loopback", lambda _: False)
    probe = Probe(is_insecure=is_insecure)
    with closing(probe.monitor):
        assert probe.status("GET /metrics HTTP/1.1", "Host: server-0:9464") == status


def test_a_failure_is_answered_and_logged_once(
    probe: Probe, caplog: pytest.LogCaptureFixture
) -> None:
    """One line in ten seconds, without a traceback."""

    class Broken(Collector):
        def collect(self) -> Iterator[Metric]:
            raise RuntimeError("no such state")

    probe.registry.register(Broken())
    answers = [get(probe.monitor.address, "/metrics") for _ in range(3)]

    assert {answer.status for answer in answers} == {500}
    assert events(caplog) == ["http_request_failed"]
    assert "no such state" in caplog.records[0].getMessage()
    assert caplog.records[0].exc_info is None


def test_other_paths_are_not_found(probe: Probe) -> None:
    """A wrong path must not look healthy."""
    assert get(probe.monitor.address, "/healthz").status == 404


def test_the_first_page_links_the_others(probe: Probe) -> None:
    page = get(probe.monitor.address, "/")

    assert page.kind == "text/html; charset=utf-8"
    for path in ("/metrics", "/livez", "/readyz"):
        assert f'<a href="{path}">' in page.body


def test_further_pages_replace_the_first_one(probe: Probe) -> None:
    """A promoted standby shows its own; they may load nothing from elsewhere."""
    document = page_answer("application/json", b'{"version": 7}')
    probe.monitor.show(probe.registry, lambda: probe.state, {"/": lambda: document})
    with closing(HTTPConnection(probe.monitor.address, timeout=5)) as connection:
        connection.request("GET", "/", headers=GZIP)
        response = connection.getresponse()
        body = gzip.decompress(response.read())

    assert body == b'{"version": 7}'
    assert "default-src 'none'; script-src 'self'" in response.headers["Content-Security-Policy"]
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["Cache-Control"] == "no-store"

    probe.monitor.show(probe.registry, lambda: probe.state)

    assert get(probe.monitor.address, "/").kind.startswith("text/html")


def test_registries_are_independent() -> None:
    """Two servers in one process do not see each other's metrics."""
    one, two = Probe(), Probe()
    with closing(one.monitor), closing(two.monitor):
        Counter("ps_steps", "steps", registry=one.registry).inc()

        assert "ps_steps_total" in get(one.monitor.address, "/metrics").body
        assert "ps_steps_total" not in get(two.monitor.address, "/metrics").body


def test_a_taken_port_is_an_error_with_the_address(probe: Probe) -> None:
    """Exit code 10."""
    with pytest.raises(TakenError, match=probe.monitor.address):
        listen_http(Endpoint(probe.monitor.address))


def test_close_frees_the_port() -> None:
    """Close twice, then bind again at once."""
    probe = Probe()
    probe.monitor.close()
    probe.monitor.close()

    listen_http(Endpoint(probe.monitor.address)).close()


def test_an_address_of_another_machine_is_a_usage_error() -> None:
    """192.0.2.1 is reserved for documentation: no machine has it."""
    with pytest.raises(InvalidRequestError, match=r"192\.0\.2\.1:0"):
        listen_http(Endpoint("192.0.2.1:0"))


@pytest.mark.skipif(not socket.has_ipv6, reason="this Python has no IPv6")
def test_ipv6_addresses_have_brackets() -> None:
    try:
        listening = listen_http(Endpoint("[::1]:0"))
    except InvalidRequestError:
        pytest.skip("this machine has no IPv6 loopback")
    with closing(MetricsServer(listening, new_registry(), lambda: (True, "ready"))) as monitor:
        assert monitor.address.startswith("[::1]:")
        assert get(monitor.address, "/readyz").body == "ready\n"
