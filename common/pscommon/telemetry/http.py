"""HTTP endpoint for Prometheus, health probes and browsers: /metrics, /livez, /readyz and pages.

One daemon thread runs an event loop, and one task in it serves a connection. A second thread
computes what may take long: the metrics take tens of milliseconds, and readiness takes locks.
So /livez answers at any time. A peer that sends or reads too slowly loses its connection at the
limit of its request, or earlier when another peer needs it.
"""

import asyncio
import errno
import gzip
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from http import HTTPStatus
from typing import TypeVar
from urllib.parse import parse_qs

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder, gzip_accepted

from pscommon.telemetry.http_connection import HttpConnection
from pscommon.telemetry.http_request import (
    Access,
    Answer,
    HttpRequest,
    is_loopback,
    page_answer,
    parse_request,
    refusal,
    text_answer,
)
from pscommon.telemetry.logs import get_logger

MAX_CONNECTIONS_COUNT = 256
MAX_HEAD_BYTES = 16 << 10
REQUEST_SECONDS = 10.0
"""Time of one request with the wait for it: from the accepted connection, or from the answer
before, to the last byte of its answer.
"""

LINGER_SECONDS = 1.0
"""Time in which a peer may read the last answer: what it still sends would reset the connection."""

ACCEPT_PAUSE_SECONDS = 0.1
"""Time without new connections after the limit of open files was reached."""

MAX_PACKED_COUNT = 8
"""Compressed answers that are kept for the next viewer of the same page."""

T = TypeVar("T")

Ready = Callable[[], tuple[bool, str]]
Pages = Mapping[str, Callable[[], Answer]]
"""By path, a function that returns the page. The second thread calls it."""

LINKS = page_answer(
    "text/html; charset=utf-8",
    b"""<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>paramserver</title>
<ul><li><a href="/metrics">/metrics</a><li><a href="/livez">/livez</a>
<li><a href="/readyz">/readyz</a></ul></html>
""",
)

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
    """HTTP server for one registry, from its construction until close().

    Attributes:
        address: The bound HOST:PORT.
        url: Its beginning of a URL, without a path.
    """

    def __init__(
        self,
        listening: socket.socket,
        registry: CollectorRegistry,
        ready: Ready,
        *,
        pages: Pages | None = None,
        authorize: Callable[[str], bool] | None = None,
        tls: Callable[[], ssl.SSLContext] | None = None,
        is_insecure: bool = False,
        request_seconds: float = REQUEST_SECONDS,
    ) -> None:
        """Start the server.

        Args:
            listening: its port; the server closes it.
            registry: metrics to serve.
            ready: called at every /readyz, in another thread; returns whether this process is
                ready, and the reason in one line.
            pages: further pages; without one for "/", that path links the others.
            authorize: returns whether a token permits to read; None: there are no tokens.
            tls: returns the context for the next connection, which asks for no client certificate;
                None: plain HTTP.
            is_insecure: permits other machines to read if there are no tokens.
            request_seconds: limit of one request.
        """
        listening.setblocking(False)
        host, port = listening.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.url = f"{'http' if tls is None else 'https'}://{self.address}"
        self._access = Access(self.url, is_loopback(host), authorize, is_insecure)
        self._listening, self._tls, self._request_seconds = listening, tls, request_seconds
        self.show(registry, ready, pages)
        # whether a connection waits for the second thread; the oldest first
        self._connections: dict[asyncio.Task[None], bool] = {}
        self._calls, self._call_turn = ThreadPoolExecutor(1, "monitor-call"), asyncio.Lock()
        self._loop, self._closing = asyncio.new_event_loop(), asyncio.Event()
        self._loop.set_exception_handler(
            lambda _, context: _note(repr(context.get("exception", context["message"])))
        )
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        self._thread.start()

    def show(self, registry: CollectorRegistry, ready: Ready, pages: Pages | None = None) -> None:
        """Replace registry, readiness and pages; the port stays."""
        self._registry, self._ready = registry, ready
        self._pages: Pages = {"/": lambda: LINKS, **(pages or {})}

    def close(self) -> None:
        """Release the port after at most one scrape; idempotent. In a fork, close its copy."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()
        self._listening.close()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve_until_closed())

    async def _serve_until_closed(self) -> None:
        self._loop.add_reader(self._listening, self._accept)
        await self._closing.wait()
        self._loop.remove_reader(self._listening)
        # a call that ended after the loop could not report to it
        self._calls.shutdown(cancel_futures=True)

    def _accept(self) -> None:
        try:
            sock, _ = self._listening.accept()
        except BlockingIOError:
            return  # the peer is gone already
        except OSError as error:
            _note(str(error))
            self._loop.remove_reader(self._listening)
            self._loop.call_later(
                ACCEPT_PAUSE_SECONDS, self._loop.add_reader, self._listening, self._accept
            )
            return
        if len(self._connections) >= MAX_CONNECTIONS_COUNT:
            idle = (task for task, is_busy in self._connections.items() if not is_busy)
            oldest = next(idle, next(iter(self._connections)))
            del self._connections[oldest]
            oldest.cancel()
        connection = HttpConnection(sock)
        task = self._loop.create_task(self._serve(connection))
        self._connections[task] = False
        task.add_done_callback(partial(self._end, connection))

    def _end(self, connection: HttpConnection, task: "asyncio.Task[None]") -> None:
        self._connections.pop(task, None)
        connection.close()

    def _mark(self, is_busy: bool) -> None:
        """Make the connection of this task the newest one, unless it was closed."""
        task = asyncio.current_task()
        assert task is not None
        if self._connections.pop(task, None) is not None:
            self._connections[task] = is_busy

    async def _serve(self, connection: HttpConnection) -> None:
        """Serve one connection until its peer, a limit or the server ends it."""
        try:
            async with asyncio.timeout(self._request_seconds) as limit:
                if self._tls is not None:
                    await connection.begin(self._tls)
                while await self._answer_next(connection):
                    self._mark(is_busy=False)
                    limit.reschedule(self._loop.time() + self._request_seconds)
                    await asyncio.sleep(0)  # after one request it is another connection's turn
                limit.reschedule(self._loop.time() + LINGER_SECONDS)
                await connection.hang_up()
        except (ConnectionError, TimeoutError, EOFError, ssl.SSLEOFError):
            pass  # the peer is gone, or was too slow
        except Exception as error:
            # ENOTCONN: the peer is gone too, but Python has no ConnectionError for it
            if getattr(error, "errno", None) != errno.ENOTCONN:
                _note(repr(error))

    async def _answer_next(self, connection: HttpConnection) -> bool:
        """Answer the next request, and return whether another one may follow."""
        head = await connection.read_head(MAX_HEAD_BYTES)
        request = None if head is None else parse_request(head)
        if head is None:
            answer = text_answer(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"the head of the request is larger than {MAX_HEAD_BYTES} bytes",
            )
        elif request is None:
            answer = text_answer(HTTPStatus.BAD_REQUEST, "this is no request of HTTP/1.1")
        else:
            answer = await self._answer(request)
        is_head = request is not None and request.method == "HEAD"
        may_follow = request is not None and request.keeps_connection
        await connection.send(answer.encode(is_head, may_follow))
        return may_follow

    async def _answer(self, request: HttpRequest) -> Answer:
        try:
            refused = refusal(request, self._access)
            if refused is not None:
                return refused
            match request.path:
                case "/livez":
                    return text_answer(HTTPStatus.OK, "alive")
                case "/readyz":
                    ok, reason = await self._call(self._ready)
                    return text_answer(
                        HTTPStatus.OK if ok else HTTPStatus.SERVICE_UNAVAILABLE, reason
                    )
                case "/metrics" if request.method == "HEAD":
                    return text_answer(HTTPStatus.OK, "")
                case "/metrics":
                    return await self._call(lambda: _render(self._registry, request))
                case path if path in self._pages:
                    return await self._call(lambda: _packed(self._pages[path](), request))
            return text_answer(HTTPStatus.NOT_FOUND, "try /metrics, /livez or /readyz")
        except Exception as error:
            _note(repr(error))
            return text_answer(
                HTTPStatus.INTERNAL_SERVER_ERROR, "the request failed: the log says why"
            )

    async def _call(self, function: Callable[[], T]) -> T:
        """Return what the second thread computes, one call at a time."""
        self._mark(is_busy=True)
        try:
            # a queue of the executor would keep the process from ending
            async with self._call_turn:
                return await self._loop.run_in_executor(self._calls, function)
        finally:
            self._mark(is_busy=False)


def _note(problem: str) -> None:
    log.warning("http_request_failed", limited=True, problem=problem)


def _render(registry: CollectorRegistry, request: HttpRequest) -> Answer:
    try:
        render, kind = choose_encoder(request.headers.get("accept", ""))
    except TypeError:  # it compares a version that is no number with numbers
        render, kind = choose_encoder("")
    names = parse_qs(request.query).get("name[]")
    body = render(registry.restricted_registry(names) if names else registry)
    return _packed(Answer(HTTPStatus.OK, body, (f"Content-Type: {kind}",)), request)


def _packed(answer: Answer, request: HttpRequest) -> Answer:
    """Return the answer in an encoding that the client accepts."""
    if not gzip_accepted(request.headers.get("accept-encoding", "")):
        return answer
    lines = (*answer.lines, "Content-Encoding: gzip")
    return answer._replace(body=_compressed(answer.body), lines=lines)


_compressed = lru_cache(MAX_PACKED_COUNT)(partial(gzip.compress, compresslevel=6))
