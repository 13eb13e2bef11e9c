"""Metrics and probes of a process over HTTP, and a port that is not available."""

import socket
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from typing import NamedTuple

import pytest
from prometheus_client import Counter

from pscommon.core.errors import InvalidRequestError, TakenError
from pscommon.telemetry.http import MetricsServer, new_registry
from pscommon.wire.endpoint import Endpoint, listen_http


class Answer(NamedTuple):
    status: int
    kind: str
    body: str


def get(address: str, path: str, accept: str = "text/plain", method: str = "GET") -> Answer:
    with closing(HTTPConnection(address, timeout=5)) as connection:
        connection.request(method, path, headers={"Accept": accept})
        response = connection.getresponse()
        return Answer(response.status, response.headers["Content-Type"], response.read().decode())


class Probe:
    """Fake process with a readiness that the test sets."""

    def __init__(self) -> None:
        self.state = (True, "serving version 7")
        self.registry = new_registry()
        self.monitor = MetricsServer(
            listen_http(Endpoint("127.0.0.1:0")), self.registry, lambda: self.state
        )

    def get(self, path: str, accept: str = "text/plain") -> Answer:
        return get(self.monitor.address, path, accept)


@pytest.fixture
def probe() -> Iterator[Probe]:
    probe = Probe()
    with closing(probe.monitor):
        yield probe


def test_metrics_include_the_registry_and_the_process(probe: Probe) -> None:
    """Own metrics, process_* and python_* are read for each scrape."""
    steps = Counter("ps_steps", "steps", registry=probe.registry)
    steps.inc()
    probe.get("/metrics")
    steps.inc()

    lines = probe.get("/metrics").body.splitlines()

    assert "ps_steps_total 2.0" in lines
    assert any(line.startswith("process_resident_memory_bytes ") for line in lines)
    assert any(line.startswith("python_info{") for line in lines)


def test_metrics_use_openmetrics_if_the_client_accepts_it(probe: Probe) -> None:
    answer = probe.get("/metrics", accept="application/openmetrics-text; version=1.0.0")

    assert answer.kind.startswith("application/openmetrics-text")
    assert answer.body.endswith("# EOF\n")
    assert probe.get("/metrics").kind.startswith("text/plain")


def test_liveness_does_not_depend_on_readiness(probe: Probe) -> None:
    """A waiting server is alive; an orchestrator would otherwise kill it."""
    probe.state = (False, "waiting for shard 1 of 2")

    assert probe.get("/livez").status == 200
    assert probe.get("/readyz").status == 503


def test_readiness_gives_the_reason_in_one_line(probe: Probe) -> None:
    """Both responses carry the reason, whatever white space it contains."""
    assert probe.get("/readyz")[::2] == (200, "serving version 7\n")

    probe.state = (False, "waiting for\n  shard 1 of 2")

    assert probe.get("/readyz")[::2] == (503, "waiting for shard 1 of 2\n")


def test_a_probe_may_use_the_head_method(probe: Probe) -> None:
    probe.state = (False, "waiting for shard 1 of 2")

    statuses = [
        get(probe.monitor.address, path, method="HEAD")[::2]
        for path in ("/livez", "/readyz", "/metrics", "/")
    ]

    assert statuses == [(200, ""), (503, ""), (200, ""), (404, "")]


def test_other_paths_are_not_found(probe: Probe) -> None:
    """A wrong path must not look healthy."""
    assert probe.get("/healthz").status == 404


def test_registries_are_independent() -> None:
    """Two servers in one process do not see each other's metrics."""
    one, two = Probe(), Probe()
    with closing(one.monitor), closing(two.monitor):
        Counter("ps_steps", "steps", registry=one.registry).inc()

        assert "ps_steps_total" in one.get("/metrics").body
        assert "ps_steps_total" not in two.get("/metrics").body


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
