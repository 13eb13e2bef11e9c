"""HTTP endpoint for Prometheus and health probes: /metrics, /livez and /readyz."""

import socket
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import MetricsHandler

from pscommon.telemetry.logs import get_logger

Ready = Callable[[], tuple[bool, str]]

# buckets of every histogram of durations: from a loopback call to the pull of a large model
SECONDS = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)

log = get_logger(__name__)


def new_registry() -> CollectorRegistry:
    """Return a new registry with the process_* and python_* metrics."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


class MetricsServer:
    """HTTP server for one registry, from its construction until close()."""

    def __init__(self, listening: socket.socket, registry: CollectorRegistry, ready: Ready) -> None:
        """Start the server.

        Args:
            listening: its port; the server closes it.
            registry: metrics to serve.
            ready: called at every /readyz, must not block; returns whether this process is ready,
                and the reason in one line.
        """
        self._handler: type[_RequestHandler] = type("Handler", (_RequestHandler,), {})
        self.show(registry, ready)
        self._server = _HttpServer(listening, self._handler)
        # close() takes at most 0.1 s
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="monitor", daemon=True
        )
        self._thread.start()

    def show(self, registry: CollectorRegistry, ready: Ready) -> None:
        """Replace registry and readiness; the port stays."""
        self._handler.registry, self._handler.ready = registry, staticmethod(ready)

    @property
    def address(self) -> str:
        """Return the bound HOST:PORT."""
        host, port = self._server.server_address[:2]
        text = str(host)
        return f"[{text}]:{port}" if ":" in text else f"{text}:{port}"

    def close(self) -> None:
        """Release the port; idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, listening: socket.socket, handler: type[MetricsHandler]) -> None:
        super().__init__(listening.getsockname()[:2], handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening

    def handle_error(self, request: object, client_address: object) -> None:
        # a scraper that hangs up is no reason for a traceback on stderr
        log.warning("http_request_failed", client=client_address, problem=repr(sys.exc_info()[1]))


class _RequestHandler(MetricsHandler):
    ready: Ready
    timeout = 10.0  # a peer that connects and says nothing is dropped

    def do_HEAD(self) -> None:
        """How `wget --spider` and many load balancers probe: the same answers without their
        text.
        """
        self.do_GET()

    def do_GET(self) -> None:
        match urlsplit(self.path).path:
            case "/metrics" if self.command == "HEAD":
                self._answer(HTTPStatus.OK, "")
            case "/metrics":
                super().do_GET()
            case "/livez":
                self._answer(HTTPStatus.OK, "alive")
            case "/readyz":
                ok, reason = self.ready()
                self._answer(HTTPStatus.OK if ok else HTTPStatus.SERVICE_UNAVAILABLE, reason)
            case _:
                self._answer(HTTPStatus.NOT_FOUND, "try /metrics, /livez or /readyz")

    def _answer(self, status: HTTPStatus, text: str) -> None:
        body = (" ".join(text.split()) + "\n").encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
