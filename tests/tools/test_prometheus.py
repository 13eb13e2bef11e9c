"""A real Prometheus scrapes a real job with the configuration of deploy/.

The job has TLS and tokens, two servers, a standby and two workers. Its panels show data, its alerts
can be evaluated, and an alert reaches the Alertmanager with its runbook.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pscommon.security.certificates import init_tls
from pscommon.security.tokens import init_tokens
from tests.support import prometheus_queries as queries
from tests.support.ports import free_ports
from tests.support.programs import Program, programs_in
from tests.support.protection import ADMIN, SERVER, WORKER
from tests.support.workers import until

MISSING = [name for name in ("prometheus", "prometheus-alertmanager") if shutil.which(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

SHARDS, SERVERS, WORKERS = 2, 3, 2
VARIABLES = ("PS_TLS_CA", "PS_TLS_CERT", "PS_TLS_KEY", "PS_TOKEN_FILE")
SCRIPT = ("--device", "cpu", "-m", "psworker.examples.digits", "--epochs", "2000")
UNKNOWN_WORKER = 99


class ScrapedJob(NamedTuple):
    """A running job.

    worker: one of its workers.
    monitors: metrics addresses of the servers, then of the workers.
    security: folder of certificates and tokens.
    """

    worker: Program
    monitors: Sequence[str]
    security: Path


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScrapedJob]:
    """Start two servers, a standby and two workers; one request of ps-ctl fails."""
    folder = tmp_path_factory.mktemp("job")
    security = folder / "security"
    init_tls(security)
    init_tokens(security)
    ports = free_ports(SHARDS + SERVERS + WORKERS)
    binds, monitors = (
        [f"127.0.0.1:{port}" for port in part] for part in (ports[:SHARDS], ports[SHARDS:])
    )
    with programs_in(folder) as programs:

        def start(command: str, files: Sequence[str], *arguments: object) -> Program:
            named = zip(VARIABLES, ("ca.pem", *files), strict=True)
            paths = {name: security / file for name, file in named}
            return programs.start(command, *arguments, **paths, OMP_NUM_THREADS=1)

        places = [
            ("--shard", f"0/{SHARDS}", "--bind", binds[0]),
            ("--shard", f"1/{SHARDS}", "--bind", binds[1], "--join", binds[0]),
            ("--shard", f"0/{SHARDS}", "--bind", "127.0.0.1:0", "--standby-of", binds[0]),
        ]
        for place, monitor, data in zip(places, monitors, ("data", "data", "other"), strict=False):
            flags = ("--metrics-bind", monitor, "--snapshot-every", "1s", "--data-dir", data)
            start("ps-server", SERVER, *place, *flags).wait_for("listening")
        workers = [
            start("ps-worker", WORKER, "--ps", binds[0], "--metrics-bind", monitor, *SCRIPT)
            for monitor in monitors[SERVERS:]
        ]
        for worker in workers:
            worker.wait_for("test accuracy")
        assert start("ps-ctl", ADMIN, "--ps", binds[0], "drain", UNKNOWN_WORKER).wait()
        yield ScrapedJob(workers[0], monitors, security)


class Prometheus:
    """Prometheus and Alertmanager on free ports, with the files of deploy/."""

    def __init__(self, folder: Path, job: ScrapedJob) -> None:
        self._folder, self._processes = folder, list[subprocess.Popen[bytes]]()
        ports = free_ports(2)
        self.address, self.alertmanager = (f"127.0.0.1:{port}" for port in ports)
        shutil.copy(queries.ALERTS, folder)
        config, receivers = folder / "prometheus.yml", folder / "alertmanager.yml"
        config.write_text(self._config(job))
        receivers.write_text("route: {receiver: none}\nreceivers: [{name: none}]\n")
        self._start(
            "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={self.address}",
        )
        self._start(
            "prometheus-alertmanager",
            f"--config.file={receivers}",
            f"--storage.path={folder / 'silences'}",
            f"--web.listen-address={self.alertmanager}",
            "--cluster.listen-address=",
        )

    def _config(self, job: ScrapedJob) -> str:
        """Return the deployed configuration with the addresses and files of the job."""
        servers, workers = job.monitors[:SERVERS], job.monitors[SERVERS:]
        text = (queries.DEPLOY / "prometheus.yml").read_text()
        changes = (
            (r"/credentials/", f"{job.security}/"),
            (r"scrape_interval: 2s.*", "scrape_interval: 500ms"),
            (r"evaluation_interval: 5s", "evaluation_interval: 500ms"),
            (r"targets: \[.*\]", f"targets: {json.dumps(servers)}"),
            (
                r"dns_sd_configs:\n.*\n",
                f"static_configs: [{{targets: {json.dumps(workers)}}}]\n",
            ),
        )
        for pattern, replacement in changes:
            text, count = re.subn(pattern, replacement, text)
            assert count, f"{pattern} is not in the deployed configuration"
        return (
            f"{text}\nalerting:\n  alertmanagers:\n"
            f'    - static_configs: [{{targets: ["{self.alertmanager}"]}}]\n'
        )

    def _start(self, *command: str) -> None:
        with (self._folder / f"{command[0]}.log").open("wb") as log:
            limits = {**os.environ, "GOMAXPROCS": "1"}
            process = subprocess.Popen(command, stdout=log, stderr=log, env=limits)
        self._processes.append(process)

    def query(self, expr: str) -> list[Any]:
        """Return the samples. Raise HTTPError if Prometheus cannot evaluate the expression."""
        found: list[Any] = self.ask("query", query=expr)["result"]
        return found

    def ask(self, path: str, **arguments: str) -> Any:
        """Return the answer of Prometheus."""
        return get(f"http://{self.address}/api/v1/{path}", **arguments)["data"]

    def alerts(self, name: str) -> list[Any]:
        """Return what the Alertmanager has of this alert; nothing while it does not answer."""
        try:
            found: list[Any] = get(
                f"http://{self.alertmanager}/api/v2/alerts", filter=f'alertname="{name}"'
            )
        except urllib.error.URLError:
            return []
        return found

    def is_ready(self) -> bool:
        """Return whether every process of the job has been scraped."""
        assert all(process.poll() is None for process in self._processes), self.logs()
        try:
            return len(self.query("up == 1")) == SERVERS + WORKERS
        except urllib.error.URLError:
            return False

    def logs(self) -> str:
        return "".join(path.read_text() for path in self._folder.glob("*.log"))

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
            process.wait(20)


def get(url: str, **arguments: str) -> Any:
    with urllib.request.urlopen(f"{url}?{urllib.parse.urlencode(arguments)}", timeout=5) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory, job: ScrapedJob) -> Iterator[Prometheus]:
    with closing(Prometheus(tmp_path_factory.mktemp("prometheus"), job)) as prometheus:
        until(prometheus.is_ready, "a scrape of each process")
        yield prometheus


def test_every_panel_shows_data(prometheus: Prometheus) -> None:
    """None needs a failure: counters begin at zero, and one request has failed."""

    def empty() -> list[str]:
        return [
            query.where for query in queries.dashboard_queries() if not prometheus.query(query.expr)
        ]

    with suppress(AssertionError):  # the next line names the panels
        until(lambda: not empty(), "data in each panel")
    assert empty() == []


def test_every_series_of_an_alert_is_scraped(prometheus: Prometheus) -> None:
    """A healthy job fires no alert, so each selector is asked alone."""
    selectors = {
        selector
        for query in (*queries.alert_queries(), *queries.annotation_queries())
        for selector in queries.selectors(query.expr)
    }
    assert len(selectors) > len(queries.alert_queries())

    def unknown() -> list[str]:
        return [selector for selector in sorted(selectors) if not prometheus.query(selector)]

    with suppress(AssertionError):  # the next line names the series
        until(lambda: not unknown(), "a sample of each series")
    assert unknown() == []


def test_prometheus_evaluates_every_rule(prometheus: Prometheus) -> None:
    def rules() -> list[Any]:
        return [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]

    until(lambda: all(rule["health"] != "unknown" for rule in rules()), "an evaluation")

    assert [(rule["name"], rule["lastError"]) for rule in rules() if rule["health"] != "ok"] == []
    assert len(rules()) == len(queries.alert_queries())
    for query in queries.annotation_queries():
        prometheus.query(query.expr)


def test_an_alert_arrives_with_its_runbook(prometheus: Prometheus, job: ScrapedJob) -> None:
    """A killed worker raises WorkersLost. This test is the last one: the job has changed."""
    assert prometheus.alerts("WorkersLost") == []

    job.worker.send(signal.SIGKILL)

    (alert,) = until(lambda: prometheus.alerts("WorkersLost"), "the alert")
    assert alert["annotations"]["runbook"] == queries.runbooks()["WorkersLost"]
    assert alert["labels"]["severity"] == "warning"
