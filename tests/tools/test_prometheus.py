"""A real Prometheus scrapes a server, its standby and a worker and answers every query of
deploy/.
"""

import json
import os
import re
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pscommon.telemetry.http import MetricsServer, new_registry
from pscommon.wire.endpoint import Endpoint, listen_http
from psserver.process.metrics import ServerMetrics, standby_metrics
from psworker.session.metrics import WorkerMetrics
from tests.support import prometheus_queries as queries

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed"
)

CONFIG = """
global: {{scrape_interval: 200ms, scrape_timeout: 200ms, evaluation_interval: 1s}}
rule_files: ["{rules}"]
scrape_configs:
  - {{job_name: servers, static_configs: [{{targets: ["{server}", "{standby}"]}}]}}
  - {{job_name: workers, static_configs: [{{targets: ["{worker}"]}}]}}
"""


class MonitoredJob:
    """One shard with its standby and one worker, in which everything happens repeatedly."""

    def __init__(self) -> None:
        servers, workers = new_registry(), new_registry()
        self.shard, self.worker, self.steps = (
            ServerMetrics(servers, shard=0),
            WorkerMetrics(workers),
            0,
        )
        self.server_monitor = MetricsServer(
            listen_http(Endpoint("127.0.0.1:0")), servers, lambda: (True, "")
        )
        standby = standby_metrics(0, lambda: self.steps)
        self.standby_monitor = MetricsServer(
            listen_http(Endpoint("127.0.0.1:0")), standby, lambda: (True, "")
        )
        self.worker_monitor = MetricsServer(
            listen_http(Endpoint("127.0.0.1:0")), workers, lambda: (True, "")
        )
        self.shard.show_shard(lambda: {"shards": "1", "job": "otter", "policy": "ssp"})
        self.shard.set_workers({"active": 1})

    def step(self) -> None:
        self.steps += 1
        for outcome in ("applied", "duplicate", "stale", "rejected"):
            self.shard.count_push(outcome, staleness=1)
        self.shard.version.set(self.steps)
        self.shard.set_worker(1, clock=self.steps, has_pushed=True)
        self.shard.record_update(0.01, contributors=1)
        self.shard.barrier_wait.observe(0.01)
        self.shard.count_bytes(received=10, sent=10)
        self.shard.set_model_size(parameters=1, nbytes=4)
        self.shard.record_call("Exchange", "OK", 0.01)
        self.shard.record_call("Exchange", "UNAVAILABLE", 0.01)
        self.shard.record_snapshot(0.1, nbytes=100)
        self.shard.count_snapshot_failure("ENOSPC")
        self.worker.step({"compute": 0.01}, samples=64)
        self.worker.reported("loss", 1.0)

    def close(self) -> None:
        self.server_monitor.close()
        self.standby_monitor.close()
        self.worker_monitor.close()


class Prometheus:
    """A Prometheus process on a free port with its data in `folder`."""

    def __init__(self, folder: Path, job: MonitoredJob) -> None:
        config = folder / "prometheus.yml"
        addresses = {
            "server": job.server_monitor.address,
            "standby": job.standby_monitor.address,
            "worker": job.worker_monitor.address,
        }
        config.write_text(CONFIG.format(rules=queries.ALERTS, **addresses))
        command = [
            "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'data'}",
        ]
        command += ["--web.listen-address=127.0.0.1:0", "--log.level=info"]
        self.log = folder / "log"
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, "GOMAXPROCS": "1"}
            )
        self._wake = threading.Event()  # never set: a pause that a deadline bounds

    @property
    def address(self) -> str:
        found = re.search(r'"Listening on" address=(\S+)', self.log.read_text())
        return found[1] if found else ""

    def query(self, expr: str) -> list[Any]:
        url = f"http://{self.address}/api/v1/query?{urllib.parse.urlencode({'query': expr})}"
        with urllib.request.urlopen(url, timeout=5) as answer:
            result: list[Any] = json.load(answer)["data"]["result"]
        return result

    def pause(self) -> None:
        self._wake.wait(0.1)
        assert self._process.poll() is None, self.log.read_text()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)


@pytest.fixture
def job() -> Iterator[MonitoredJob]:
    with closing(MonitoredJob()) as job:
        yield job


@pytest.fixture
def prometheus(tmp_path: Path, job: MonitoredJob) -> Iterator[Prometheus]:
    with closing(Prometheus(tmp_path, job)) as prometheus:
        deadline = time.monotonic() + 30
        while not prometheus.address:
            assert time.monotonic() < deadline, prometheus.log.read_text()
            prometheus.pause()
        yield prometheus


def test_every_query_finds_data(prometheus: Prometheus, job: MonitoredJob) -> None:
    """Each panel shows data after a few scrapes; alerts and annotations are accepted."""
    empty = queries.dashboard_queries()
    deadline = time.monotonic() + 30
    while empty and time.monotonic() < deadline:
        job.step()
        prometheus.pause()
        empty = [query for query in empty if not prometheus.query(query.expr)]

    assert not empty
    for query in [*queries.alert_queries(), *queries.annotation_queries()]:
        prometheus.query(query.expr)  # one that it cannot evaluate is answered with an HTTP error
