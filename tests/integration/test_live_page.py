"""The live page of a job and its document, over HTTP from a server with workers."""

import json
import math
import re
import time
from collections.abc import Callable
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from pscommon.telemetry.logs import get_logger
from pscommon.telemetry.recent_events import MAX_EVENTS_COUNT
from psserver.coordinator.service import CoordinatorService
from psserver.coordinator.status import describe_page
from psserver.core.commands.worker_commands import Join
from psserver.core.workers.members import WorkerHeartbeat
from psserver.core.workers.reported_values import ReportedValue
from psserver.monitoring.live_page import FILES, FOLDER, MAX_WORKERS_COUNT, live_pages
from psserver.server import Server
from psworker.ctl import views
from tests.support.cluster import Cluster
from tests.support.metrics_scrape import get
from tests.support.standbys import RunningStandby
from tests.support.workers import count, counter, status, until

Make = Callable[..., Cluster]
LOOPBACK = "127.0.0.1:0"
SCRIPT, IMAGE = "<script>alert(1)</script>", "<img src=x onerror=alert(1)>"
log = get_logger("psserver.test")
PHASES = ("data", "compute", "push", "wait", "apply", "pull")
MAX_PAGE_BYTES, MAX_DOCUMENT_BYTES, MAX_SECONDS = 100_000, 200_000, 0.02


def document(server: Server) -> dict[str, Any]:
    answer = get(server.monitor.address, "/status.json")
    assert answer.status == 200
    return dict(json.loads(answer.text))


def test_the_document_is_the_status_with_curves(
    cluster: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    servers = cluster(2, metrics_bind=LOOPBACK)
    first = servers.servers[0]
    with counter(servers.address, rank=0) as low, counter(servers.address, rank=1) as high:
        high.report(loss=9.0)
        low.report(loss=0.5)
        low.report(bad=float("nan"))
        shown = until(
            lambda: (d := document(first))["series"]["reported"].keys() == {"loss", "bad"} and d,
            "the reported values",
        )
        known = status(servers.address)

    assert shown.keys() - known.keys() == {"series", "workers_omitted"}
    assert known.keys() <= shown.keys()
    assert shown["series"]["reported"]["loss"]["values"] == [0.5]  # of the lowest rank
    assert shown["series"]["reported"]["bad"]["values"] == [None]
    assert shown["series"]["samples_per_second"]["times"][0] <= time.time()
    assert known["page"] == f"http://{first.monitor.address}/"
    assert {"listening", "worker_joined"} <= {event["event"] for event in known["events"]}


def test_the_document_has_learning_rate_and_gradient_norm(cluster: Make) -> None:
    """The norm is that of the newest update, where the job computes it."""
    computed, unknown = cluster(1, max_norm=1e9), cluster(1)
    with counter(computed.address) as first, counter(unknown.address) as second:
        count(first, 1)
        count(second, 1)
        (with_norm,) = status(computed.address)["optimizers"]
        (without,) = status(unknown.address)["optimizers"]

    assert (with_norm["optimizer"], with_norm["learning_rates"]) == ("", [1.0])
    assert with_norm["gradient_norm"] == pytest.approx(math.sqrt(220))
    assert without == {**with_norm, "gradient_norm": None}


def test_the_page_and_its_parts_are_small_and_load_nothing_from_elsewhere(cluster: Make) -> None:
    first = cluster(1, metrics_bind=LOOPBACK).servers[0]
    parts = {path: get(first.monitor.address, path) for path in FILES}

    assert {answer.status for answer in parts.values()} == {200}
    assert sum(len(answer.text.encode()) for answer in parts.values()) < MAX_PAGE_BYTES
    links = re.findall(r"""(?:src|href)=["']?([^"' >]+)""", parts["/"].text)
    assert {"page.js", "page.css", "icon.svg", "status.json"} <= set(links)
    assert not [link for link in links if "//" in link]
    connection = HTTPConnection(first.monitor.address, timeout=5)
    connection.request("GET", "/page.js")
    response = connection.getresponse()
    assert "script-src 'self'" in response.headers["Content-Security-Policy"]
    assert response.headers["Content-Type"].startswith("text/javascript")
    connection.close()


def test_the_script_inserts_text_only_as_text() -> None:
    """The document may have markup in any text; see also the test with a browser."""
    script = (FOLDER / "page.js").read_text()

    for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert unsafe not in script
    for unsafe in ("new Function", "DOMParser", "createContextualFragment", "javascript:", ".href"):
        assert unsafe not in script


def test_markup_in_names_arrives_unchanged(cluster: Make) -> None:
    servers = cluster(1, metrics_bind=LOOPBACK)
    first = servers.servers[0]
    with counter(servers.address) as client:
        client.report(**{SCRIPT: 0.5})
        with first.service.executor.step() as (recorder, _):
            recorder.coordinator.membership.members[client.worker].host = IMAGE
        shown = until(lambda: (d := document(first))["metrics"] and d, "the reported value")

    assert SCRIPT in shown["series"]["reported"]
    assert shown["workers"][0]["host"] == IMAGE


def test_other_ports_link_the_metrics(cluster: Make) -> None:
    servers = cluster(2, metrics_bind=LOOPBACK).servers
    with RunningStandby(servers[0]) as following:
        for address in (servers[1].monitor.address, following.standby.monitor.address):
            assert '<a href="/metrics">' in get(address, "/").text
            assert get(address, "/status.json").status == 404


def test_a_job_without_metrics_port_has_no_page(cluster: Make) -> None:
    assert status(cluster(1).address)["page"] is None


def test_status_names_the_page() -> None:
    (summary, *_) = views.status({"page": "http://127.0.0.1:1/"})

    assert ("page", "http://127.0.0.1:1/") in summary.rows


def test_the_document_is_built_at_most_once_a_second(
    cluster: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many viewers ask; commands see their effects in the status at once."""
    servers = cluster(1, policy="async", metrics_bind=LOOPBACK)
    first = servers.servers[0]
    monkeypatch.setattr("psserver.monitoring.live_page.BUILD_SECONDS", 1e6)
    with counter(servers.address) as client:
        document(first)
        count(client, 2)
        assert (document(first)["version"], status(servers.address)["version"]) == (0, 2)
        monkeypatch.setattr("psserver.monitoring.live_page.BUILD_SECONDS", 0.0)
        assert document(first)["version"] == 2


def test_events_end_with_the_server(cluster: Make) -> None:
    """Two servers of one process, one after the other, do not keep each other's handlers."""
    first = cluster(1)
    service = first.servers[0].service
    first.close()
    before = service.events.newest()
    cluster(1)

    assert service.events.newest() == before


@pytest.fixture
def large(cluster: Make) -> CoordinatorService:
    """A job with 256 workers, 1000 reported names and as many events as possible."""
    service = cluster(1, policy="async", lease=600.0).servers[0].service
    for number in range(256):
        host, rank = f"training-node-{number:03}", number
        service.executor.do(Join(rank, host, 10_000 + number, "cuda:0"))
    with service.executor.step() as (recorder, _):
        coordinator = recorder.coordinator
        for member in coordinator.membership:
            spent = dict.fromkeys(PHASES, 1234.5678 + member.worker)
            member.heartbeat = WorkerHeartbeat(0.123456, 1234.56789, "compute", 0.123, spent)
            names = range(1000 if member.rank == 0 else 1)
            for at in range(0, 40 if member.rank == 0 else 2, 2):
                values = [
                    ReportedValue(f"metrics/value-{name}", 0.1234567 * (name + at), 1, 1.8e9 + at)
                    for name in names
                ]
                coordinator.reported.take(member, values, coordinator.membership)
    for number in range(MAX_EVENTS_COUNT):
        log.warning("push_refused", worker=number, push=1, reason="STALE", detail="d" * 80)
    return service


def test_the_document_of_a_large_job_is_small(large: CoordinatorService) -> None:
    """Workers beyond MAX_WORKERS_COUNT are counted, and so are names without a curve."""
    body = live_pages(partial(describe_page, large))["/status.json"]().body
    shown = json.loads(body)

    assert len(body) < MAX_DOCUMENT_BYTES
    assert len(shown["workers"]) == MAX_WORKERS_COUNT
    assert shown["workers_omitted"] == 256 - MAX_WORKERS_COUNT
    assert shown["series"]["omitted"] == 950
    assert min(len(curve["times"]) for curve in shown["series"]["reported"].values()) >= 6
    curves = [shown["series"]["samples_per_second"], *shown["series"]["reported"].values()]
    assert sum(len(curve["times"]) for curve in curves) <= 1000


@pytest.mark.timing
def test_the_document_of_a_large_job_is_quick(large: CoordinatorService) -> None:
    def seconds() -> float:
        build = live_pages(partial(describe_page, large))["/status.json"]
        began = time.perf_counter()
        build()
        return time.perf_counter() - began

    assert min(seconds() for _ in range(9)) < MAX_SECONDS


def test_the_files_of_the_page_are_beside_the_code() -> None:
    assert {name for name, _ in FILES.values()} == {path.name for path in Path(FOLDER).iterdir()}
