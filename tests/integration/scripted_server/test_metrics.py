"""The metrics of a worker, which are served once per process."""

import math
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import Iterator

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from pscommon.core.errors import TakenError
from pscommon.core.model_spec import OptimizerSettings
from psworker.client.client import Client
from psworker.session import metrics
from psworker.session.metrics import MAX_REPORTED_NAMES, WorkerMetrics
from tests.support.fake_server import FakeCluster


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture(autouse=True)
def stopped_server() -> Iterator[None]:
    """Start and end each test with a process that serves nothing."""
    metrics.close()
    yield
    metrics.close()


def scrape(address: str) -> list[str]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
        return answer.read().decode().splitlines()


def test_a_step_is_counted_with_its_phases(registry: CollectorRegistry) -> None:
    """Phases separately; steps and samples add up."""
    worker = WorkerMetrics(registry)
    worker.step({"compute": 0.03, "push": 0.2}, samples=64)
    worker.step({"compute": 0.04}, samples=32)

    assert registry.get_sample_value("ps_worker_steps_total") == 2
    assert registry.get_sample_value("ps_worker_samples_total") == 96
    assert registry.get_sample_value("ps_worker_phase_seconds_count", {"phase": "compute"}) == 2
    assert registry.get_sample_value("ps_worker_phase_seconds_sum", {"phase": "push"}) == 0.2
    assert registry.get_sample_value("ps_worker_phase_seconds_count", {"phase": "wait"}) == 0


def test_reported_values_are_shown(registry: CollectorRegistry) -> None:
    """The last value counts; a loss also has its own name, and is NaN before."""
    worker = WorkerMetrics(registry)
    assert math.isnan(registry.get_sample_value("ps_worker_loss") or 0)

    worker.reported("loss", 2.0)
    worker.reported("loss", 1.5)
    worker.reported("accuracy", 0.97)

    assert registry.get_sample_value("ps_worker_loss") == 1.5
    assert registry.get_sample_value("ps_worker_reported", {"name": "loss"}) == 1.5
    assert registry.get_sample_value("ps_worker_reported", {"name": "accuracy"}) == 0.97


def test_reported_names_are_bounded(registry: CollectorRegistry) -> None:
    """Names beyond the bound are dropped; the known ones continue."""
    worker = WorkerMetrics(registry)
    for number in range(MAX_REPORTED_NAMES + 1):
        worker.reported(f"value {number}", number)
    worker.reported("value 0", 7)

    assert (
        registry.get_sample_value("ps_worker_reported", {"name": f"value {MAX_REPORTED_NAMES}"})
        is None
    )
    assert registry.get_sample_value("ps_worker_reported", {"name": "value 0"}) == 7


def test_recording_without_a_server_has_no_effect() -> None:
    """Values recorded before the server starts are dropped."""
    metrics.step({"compute": 0.1}, samples=1)
    metrics.reported("loss", 1.0)

    lines = scrape(metrics.serve("127.0.0.1:0"))

    assert "ps_worker_steps_total 0.0" in lines
    assert "ps_worker_loss NaN" in lines


def test_a_scrape_has_recorded_values_and_process_metrics() -> None:
    address = metrics.serve("127.0.0.1:0")
    metrics.step({"compute": 0.1}, samples=3)
    metrics.reported("loss", 0.5)

    lines = scrape(address)

    assert {"ps_worker_samples_total 3.0", "ps_worker_loss 0.5"} <= set(lines)
    assert any(line.startswith("process_cpu_seconds_total ") for line in lines)


def test_a_script_that_uses_arrays_is_counted() -> None:
    """Without a Job: the time of its pulls and pushes is known (these servers only wait), the rest
    is the script's.
    """
    address, arrays = metrics.serve("127.0.0.1:0"), {"w": np.ones(3, np.float32)}
    with FakeCluster(shards=1) as cluster, Client(cluster.addresses) as client:
        client.register(arrays, OptimizerSettings("sgd", ({"lr": 0.5},)))
        client.pull()
        client.push(arrays, samples=3)
        client.push_pull(arrays)
        client.report(loss=0.5)

    lines = scrape(address)
    assert {
        "ps_worker_steps_total 2.0",
        "ps_worker_samples_total 4.0",
        "ps_worker_loss 0.5",
    } <= set(lines)
    spent = {
        name: float(seconds)
        for name, _, seconds in (line.rpartition(" ") for line in lines)
        if "_sum" in name
    }
    assert all(
        spent[f'ps_worker_phase_seconds_sum{{phase="{phase}"}}'] > 0
        for phase in ("pull", "wait", "compute")
    )


def test_metrics_are_served_once_per_process() -> None:
    """A script that connects twice keeps its counts and its port."""
    address = metrics.serve("127.0.0.1:0")
    metrics.step({}, samples=3)

    assert metrics.serve("127.0.0.1:0") == address
    assert "ps_worker_samples_total 3.0" in scrape(address)


def test_a_taken_port_leaves_nothing_behind() -> None:
    """After the error the process may still serve."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken = f"127.0.0.1:{holder.getsockname()[1]}"
        with pytest.raises(TakenError, match=taken):
            metrics.serve(taken)

    assert metrics.serve(taken) == taken


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_metric_names_pass_the_linter_of_prometheus(registry: CollectorRegistry) -> None:
    WorkerMetrics(registry).reported("loss", 1.0)
    text = generate_latest(registry).decode()
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=20
    )

    assert (done.returncode, done.stdout + done.stderr) == (0, "")
