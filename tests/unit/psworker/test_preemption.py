"""Preemption notices, from a file and from servers that answer like metadata servers."""

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from psworker.core.clock import Clock
from psworker.session.drain import Drain
from psworker.session.preemption import is_noticed, watch
from tests.support.events import records_of
from tests.support.ports import free_port
from tests.support.workers import until

TOKEN = "a token"


class Metadata(BaseHTTPRequestHandler):
    """Answers of the metadata servers of Google and Amazon; `noticed` ends the machine."""

    noticed = False

    def do_GET(self) -> None:
        if self.path == "/google":
            is_asked = self.headers["Metadata-Flavor"] == "Google"
            self._answer(200 if is_asked else 403, "TRUE" if self.noticed else "FALSE")
        elif self.path == "/amazon" and self.headers["X-aws-ec2-metadata-token"] != TOKEN:
            self._answer(401, "")
        elif self.path == "/amazon":
            self._answer(200 if self.noticed else 404, '{"action": "terminate"}')
        else:
            self._answer(500, "")

    def do_PUT(self) -> None:
        is_asked = (
            self.path == "/latest/api/token"
            and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        )
        self._answer(200 if is_asked else 400, TOKEN)

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def metadata() -> Iterator[tuple[str, type[Metadata]]]:
    """Yield the address of a metadata server, and its class."""
    handler = type("Own", (Metadata,), {})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", handler
        server.shutdown()


@pytest.fixture
def member() -> Iterator[Drain]:
    """A worker of this process that is in a job."""
    drain = Drain(Clock(time.monotonic, time.sleep))
    drain.opens()
    yield drain
    drain.closes()


@pytest.mark.parametrize("path", ["/google", "/amazon"])
def test_a_metadata_server_gives_notice(metadata: tuple[str, type[Metadata]], path: str) -> None:
    address, handler = metadata
    assert not is_noticed(address + path)

    handler.noticed = True
    assert is_noticed(address + path)


def test_a_notice_lets_the_worker_leave(
    metadata: tuple[str, type[Metadata]], member: Drain
) -> None:
    address, handler = metadata
    watch(f"{address}/google", 0.01)
    assert not member.asked

    handler.noticed = True
    until(lambda: member.asked, "the drain")


def test_a_file_that_appears_is_a_notice_also_before_the_worker_joins(tmp_path: Path) -> None:
    notice = tmp_path / "preempted"
    watch(str(notice), 0.01)
    notice.touch()
    drain = Drain(Clock(time.monotonic, time.sleep))
    drain.opens()
    try:
        until(lambda: drain.asked, "the drain")
    finally:
        drain.closes()


@pytest.mark.parametrize("path", ["closed", "/error"])
def test_an_address_that_gives_no_answer_is_logged_once(
    metadata: tuple[str, type[Metadata]],
    member: Drain,
    caplog: pytest.LogCaptureFixture,
    path: str,
) -> None:
    address, _ = metadata
    place = f"http://127.0.0.1:{free_port()}/" if path == "closed" else address + path
    asked = threading.Semaphore(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "psworker.session.preemption.is_noticed",
            lambda where: (asked.release(), is_noticed(where))[1],
        )
        watch(place, 0.01)
        for _ in range(5):
            assert asked.acquire(timeout=30)

    (record,) = records_of(caplog, "preemption_unknown")
    assert record.levelname == "WARNING"
    assert record.__dict__["place"] == place
    assert not member.asked
