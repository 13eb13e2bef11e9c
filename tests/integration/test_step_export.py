"""Steps as OpenTelemetry spans, received by an OTLP receiver in this process."""

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster
from tests.support.events import records_of
from tests.support.forked_job import ForkedJob, serve
from tests.support.worker_scripts import train
from tests.support.workers import ONES, counter, until

proto = pytest.importorskip(
    "opentelemetry.proto.collector.trace.v1.trace_service_pb2",
    reason="the extra [otel] is not installed",
)

Make = Callable[..., Cluster]
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
SECONDS = 6.0


class Receiver:
    """An OTLP receiver over HTTP. spans: all received ones, with the process that each is of."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.receive(self.path, body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def receive(self, path: str, body: bytes) -> None:
        assert path == "/v1/traces"
        for resource in proto.ExportTraceServiceRequest.FromString(body).resource_spans:
            about = {each.key: each.value.string_value for each in resource.resource.attributes}
            assert about["service.name"] == "paramserver"
            for scope in resource.scope_spans:
                self.spans += [(about["service.instance.id"], span) for span in scope.spans]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    found = Receiver()
    monkeypatch.setenv(ENDPOINT, found.address)
    yield found
    found.close()


def push_for(cluster: Cluster, seconds: float) -> None:
    """Let a worker push for this long."""
    pause, end = threading.Event(), time.monotonic() + seconds
    with counter(cluster.address) as client:
        while time.monotonic() < end:
            client.push_pull(ONES)
            pause.wait(0.02)


def serve_with_export(arguments: Sequence[str], log: Path) -> None:
    """Run a server process whose environment has the endpoint in a file beside the log."""
    os.environ[ENDPOINT] = (log.parent / "endpoint").read_text()
    serve(arguments, log)


class ExportingJob(ForkedJob):
    body = staticmethod(serve_with_export)


@pytest.mark.full
def test_a_step_is_one_trace_over_all_processes(tmp_path: Path, receiver: Receiver) -> None:
    began = time.time_ns()
    (tmp_path / "endpoint").write_text(receiver.address)
    with ExportingJob(tmp_path, 2, ["--min-workers", 2], train, pause=0.02, epochs=40) as job:
        job.start_all(2)
        until(
            lambda: sum(span.name == "step" for _, span in receiver.spans) >= 3, "three steps", 90
        )

    traces = defaultdict(list)
    for process, span in receiver.spans:
        traces[span.trace_id].append((process, span))
    for spans in traces.values():
        by_id = {span.span_id: span for _, span in spans}
        (root,) = (span for _, span in spans if not span.parent_span_id)
        assert root.name == "step"
        assert began < root.start_time_unix_nano < root.end_time_unix_nano < time.time_ns()
        of_processes = [each for each in spans if each[1].parent_span_id == root.span_id]
        assert sorted(span.name for _, span in of_processes) == sorted({p for p, _ in spans})
        assert {p for p, _ in spans} == {"shard 0", "shard 1", "worker 1", "worker 2"}
        for _, span in spans:
            if span is not root:
                parent = by_id[span.parent_span_id]
                assert parent.start_time_unix_nano <= span.start_time_unix_nano
                assert span.end_time_unix_nano <= parent.end_time_unix_nano
        assert {"compute", "send", "check", "decide", "apply"} < {span.name for _, span in spans}


def test_training_goes_on_without_a_receiver(
    cluster: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    servers = cluster(policy="async")
    push_for(servers, SECONDS)
    until(lambda: records_of(caplog, "otel_failed"), "a warning")

    push_for(servers, 0.1)


def test_a_missing_package_is_a_warning(
    cluster: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:1")
    monkeypatch.setattr("psserver.monitoring.step_export.find_spec", lambda name: None)

    push_for(cluster(policy="async"), 0.1)

    assert records_of(caplog, "otel_unavailable")
