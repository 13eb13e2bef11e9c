"""The live page in Chromium: on a phone and a desktop, light and dark, and without its server.

`make test-page` runs it. PAGE_SCREENSHOTS=docs writes the pictures of the documentation.
"""

import math
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pscommon.settings.values import SnapshotEvery
from psserver.coordinator.status import describe_page
from psserver.monitoring.live_page import live_pages
from tests.support.cluster import Cluster
from tests.support.metrics_port import Probe
from tests.support.programs import programs_in
from tests.support.workers import ONES, connected, counter, snapshots, until

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

Make = Callable[..., Cluster]
SCRIPT, IMAGE = "<script>alert(1)</script>", "<img src=x onerror=alert(1)>"
PHONE, DESKTOP = {"width": 375, "height": 812}, {"width": 1280, "height": 900}
MAX_WAIT_MILLISECONDS = 30_000
SHOWN_COUNT = 6
"""Documents that a picture has waited for."""


class PushingWorkers:
    """Two workers that push and report a loss until the end."""

    def __init__(self, address: str, **values: float) -> None:
        self._address, self._values, self._ended = address, values, threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(rank,)) for rank in (0, 1)]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _run(self, rank: int) -> None:
        with counter(self._address, rank=rank) as client:
            step = 0
            while not self._ended.wait(0.02 * (1 + rank)):
                step += 1
                client.push(ONES, samples=32)
                client.report(loss=2.3 * math.exp(-step / 200), **self._values)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright.expect.set_options(timeout=MAX_WAIT_MILLISECONDS)
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def servers(cluster: Make, tmp_path: Path) -> Cluster:
    return cluster(
        2,
        policy="async",
        data_dir=tmp_path,
        snapshot_every=SnapshotEvery(steps=50),
        max_norm=1e9,
        metrics_bind="127.0.0.1:0",
        job="otter",
    )


class Visit:
    """A page in a window of its own, and what went wrong in it."""

    def __init__(
        self, browser: Any, url: str, size: dict[str, int], scheme: str, password: str = ""
    ) -> None:
        self.errors: list[str] = []
        self.asked: list[str] = []
        typed = {"username": "anyone", "password": password} if password else None
        self.page = browser.new_page(viewport=size, color_scheme=scheme, http_credentials=typed)
        self.page.on("console", self._note)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", lambda dialog: self.errors.append(dialog.message))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(url)

    def _note(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def expect(self, selector: str) -> Any:
        """Return assertions that wait; the policy of the page forbids those that are scripts."""
        return playwright.expect(self.page.locator(selector))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_the_page_shows_the_job(
    browser: Any,
    servers: Cluster,
    size: dict[str, int],
    scheme: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    with PushingWorkers(servers.address, accuracy=0.5):
        until(lambda: snapshots(servers.address), "a snapshot")
        visit = Visit(browser, servers.servers[0].service.page, size, scheme)
        visit.expect("#workers tbody tr").to_have_count(2)
        visit.expect("#workers .bar").to_have_count(2)
        visit.expect("#curves path[d*=L]").to_have_count(3)
        page = visit.page
        assert page.inner_text("h1") == "Job otter"
        assert page.inner_text("#connection") == "Connected"
        assert page.locator("#servers tbody tr").count() == 2
        visit.expect("#summary").to_contain_text(re.compile(r"learning rate1gradient norm14\.83"))
        visit.expect("#events").to_contain_text("worker_joined")
        assert page.locator("#legend svg").count() == 6
        assert "complete" in page.inner_text("#snapshot")
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= size["width"]
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (back == "rgb(255, 255, 255)") == (scheme == "light")
    page.close()

    assert visit.errors == []
    assert {url.startswith(servers.servers[0].service.page) for url in visit.asked} == {True}


def test_the_keyboard_reaches_all(browser: Any, servers: Cluster) -> None:
    with PushingWorkers(servers.address):
        visit = Visit(browser, servers.servers[0].service.page, DESKTOP, "light")
        visit.expect("#curves path[d*=L]").to_have_count(2)
        page = visit.page
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the job"
        page.keyboard.press("Tab")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.getAttribute('class')") == "chart"
        page.keyboard.press("Home")
        shown = page.evaluate("document.activeElement.closest('figure').textContent")
        assert ":" in shown.partition("loss")[2]  # the time of the selected value
        # the next documents do not take the focus
        before = len(visit.asked)
        while len(visit.asked) < before + 2:
            page.wait_for_event("requestfinished")
        assert page.evaluate("document.activeElement.getAttribute('class')") == "chart"
    page.close()

    assert visit.errors == []


def test_markup_from_workers_is_text(browser: Any, servers: Cluster) -> None:
    service = servers.servers[0].service
    with connected(servers.address) as client:
        with service.executor.step() as (recorder, _):
            recorder.coordinator.membership.members[client.worker].host = IMAGE
        client.report(**{SCRIPT: 0.5, IMAGE: 1.0})
        visit = Visit(browser, service.page, PHONE, "light")
        visit.expect("#curves figure").to_have_count(3)
        page = visit.page
        assert SCRIPT in page.inner_text("#curves")
        assert IMAGE in page.inner_text("#workers")
        assert page.locator("main img, main script").count() == 0
    page.close()

    assert visit.errors == []


def test_the_page_shows_a_lost_server_until_it_answers_again(browser: Any, cluster: Make) -> None:
    servers = cluster(1, metrics_bind="127.0.0.1:0")
    address = servers.servers[0].monitor.address
    visit = Visit(browser, f"http://{address}/", DESKTOP, "light")
    visit.expect("#connection").to_have_text("Connected")
    assert visit.errors == []

    servers.close()

    visit.expect("#connection").to_contain_text("The server does not answer since")
    assert visit.page.title().startswith("gone · ")

    cluster(1, metrics_bind=address)

    visit.expect("#connection").to_contain_text("answers again")
    assert not visit.page.title().startswith("gone")
    visit.page.close()
    assert all("ERR_CONNECTION_REFUSED" in error for error in visit.errors)


def test_the_browser_asks_for_a_token_as_password(
    browser: Any, cluster: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address looks like that of another interface."""
    service = cluster(1).servers[0].service
    monkeypatch.setattr("pscommon.telemetry.http.is_loopback", lambda _: False)
    pages = live_pages(partial(describe_page, service))
    probe = Probe(authorize=lambda token: token == "secret", pages=pages)
    with closing(probe.monitor):
        visit = Visit(browser, probe.monitor.url, DESKTOP, "light", "secret")
        visit.expect("#connection").to_have_text("Connected")
        visit.page.close()


def test_a_run_prints_the_page_that_the_documentation_shows(browser: Any, tmp_path: Path) -> None:
    """PAGE_SCREENSHOTS names the folder for the pictures."""
    line = "--servers 2 --workers 2 --device cpu --data-dir data --snapshot-every 5s"
    script = "-m psworker.examples.digits --epochs 400"
    with programs_in(tmp_path) as programs:
        run = programs.start("ps-run", *line.split(), *script.split())
        url = re.search(r"live page: (\S+)", run.wait_for("live page: "))[1]
        take_pictures(browser, url)


def take_pictures(browser: Any, url: str) -> None:
    for name, size, scheme in (("phone", PHONE, "dark"), ("desktop", DESKTOP, "light")):
        visit = Visit(browser, url, size, scheme)
        visit.expect("#workers .bar").to_have_count(2)
        visit.expect("#progress").to_be_visible()
        while visit.asked.count(f"{url}status.json") < SHOWN_COUNT:
            visit.page.wait_for_event("requestfinished")
        if folder := os.environ.get("PAGE_SCREENSHOTS"):
            visit.page.screenshot(path=Path(folder) / f"live-page-{name}.png")
        visit.page.close()
        assert visit.errors == []
