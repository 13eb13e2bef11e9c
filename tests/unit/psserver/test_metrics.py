"""The metrics of a server after certain events."""

import re
import shutil
import subprocess
import time

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from pscommon.telemetry.http import new_registry
from psserver.process.metrics import MAX_WORKERS, SNAPSHOT_FAILURES, ServerMetrics


@pytest.fixture
def registry() -> CollectorRegistry:
    return new_registry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> ServerMetrics:
    return ServerMetrics(registry, shard=1)


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, {"shard": "1", **labels})


def workers_of(registry: CollectorRegistry, name: str = "ps_worker_clock") -> set[str]:
    return {
        sample.labels["worker"]
        for family in registry.collect()
        for sample in family.samples
        if sample.name == name
    }


def test_all_counters_start_at_zero(registry: CollectorRegistry, metrics: ServerMetrics) -> None:
    """A rate over a counter that appears with its first event would miss that event."""
    counters = [
        ("ps_pushes_total", "outcome", outcome)
        for outcome in ("applied", "duplicate", "stale", "rejected")
    ]
    counters += [("ps_snapshot_failures_total", "reason", reason) for reason in SNAPSHOT_FAILURES]

    assert [value(registry, name, **{label: text}) for name, label, text in counters] == [
        0.0
    ] * len(counters)
    assert value(registry, "ps_bytes_received_total") == 0
    assert value(registry, "ps_push_apply_seconds_count") == 0


def test_info_series_are_unique_and_replaced(
    registry: CollectorRegistry, metrics: ServerMetrics
) -> None:
    """One series each; the newest value replaces the older one."""
    policies = iter(["sync", "ssp"])
    metrics.show_shard(lambda: {"shards": "2", "job": "otter", "policy": next(policies)})

    generate_latest(registry)
    text = generate_latest(registry).decode()

    assert re.findall(r"^ps_shard_info\{(.*)\} 1\.0$", text, re.M) == [
        'job="otter",policy="ssp",shard="1",shards="2"'
    ]
    assert re.search(r'^ps_build_info\{.*version="0\.1\.0".*\} 1\.0$', text, re.M)


def test_progress_gauges_show_the_last_value(
    registry: CollectorRegistry, metrics: ServerMetrics
) -> None:
    metrics.set_model_size(parameters=1000, nbytes=4000)
    metrics.version.set(6)
    metrics.version.set(7)

    names = ("ps_version", "ps_parameters", "ps_parameter_bytes")
    assert [value(registry, name) for name in names] == [7, 1000, 4000]


def test_push_outcomes_are_counted_separately(
    registry: CollectorRegistry, metrics: ServerMetrics
) -> None:
    """A push without a staleness is not in the histogram."""
    metrics.count_push("applied", staleness=0)
    metrics.count_push("applied", staleness=5)
    metrics.count_push("duplicate")

    assert value(registry, "ps_pushes_total", outcome="applied") == 2
    assert value(registry, "ps_pushes_total", outcome="duplicate") == 1
    assert value(registry, "ps_staleness_versions_count") == 2
    assert value(registry, "ps_staleness_versions_bucket", le="0.0") == 1
    assert value(registry, "ps_staleness_versions_bucket", le="6.0") == 2


def test_durations_are_counted_in_their_bucket(
    registry: CollectorRegistry, metrics: ServerMetrics
) -> None:
    metrics.record_update(0.0004, contributors=3)
    metrics.barrier_wait.observe(20.0)

    assert value(registry, "ps_push_apply_seconds_bucket", le="0.0005") == 1
    assert value(registry, "ps_apply_pushes_sum") == 3
    assert value(registry, "ps_barrier_wait_seconds_bucket", le="10.0") == 0
    assert value(registry, "ps_barrier_wait_seconds_bucket", le="30.0") == 1


def test_network_bytes_and_calls_are_counted_by_label(
    registry: CollectorRegistry, metrics: ServerMetrics
) -> None:
    """Bytes by direction, calls by method and code."""
    metrics.count_bytes(received=10)
    metrics.count_bytes(received=5, sent=7)
    metrics.record_call("Exchange", "OK", 0.002)
    metrics.record_call("Exchange", "UNAVAILABLE", 0.002)

    assert value(registry, "ps_bytes_received_total") == 15
    assert value(registry, "ps_bytes_sent_total") == 7
    assert value(registry, "ps_rpc_requests_total", method="Exchange", code="UNAVAILABLE") == 1
    assert value(registry, "ps_rpc_duration_seconds_count", method="Exchange") == 2


def test_an_unused_worker_state_returns_to_zero(
    registry: CollectorRegistry, metrics: ServerMetrics
) -> None:
    metrics.set_workers({"active": 2, "joined": 1})
    metrics.set_workers({"active": 3})

    assert value(registry, "ps_workers", state="active") == 3
    assert value(registry, "ps_workers", state="joined") == 0


def test_the_series_of_a_worker_end_with_it(
    registry: CollectorRegistry, metrics: ServerMetrics
) -> None:
    """A second or unknown gone() has no effect."""
    before = time.time()
    metrics.set_worker(12, clock=4, has_pushed=True)

    assert value(registry, "ps_worker_clock", worker="12") == 4
    last = value(registry, "ps_worker_last_push_timestamp_seconds", worker="12")
    assert last is not None
    assert before <= last <= time.time()

    metrics.remove_worker(12)
    metrics.remove_worker(12)
    metrics.remove_worker(99)

    assert (
        workers_of(registry)
        == workers_of(registry, "ps_worker_last_push_timestamp_seconds")
        == set()
    )


def test_worker_series_are_bounded(registry: CollectorRegistry, metrics: ServerMetrics) -> None:
    """Beyond the bound workers share one series; a free place goes to the next worker that
    pushes.
    """
    for worker in range(MAX_WORKERS + 2):
        metrics.set_worker(worker, clock=worker, has_pushed=True)

    assert len(workers_of(registry)) == MAX_WORKERS + 1
    assert value(registry, "ps_worker_clock", worker="other") == MAX_WORKERS + 1

    metrics.remove_worker(0)
    metrics.set_worker(MAX_WORKERS, clock=1, has_pushed=True)

    assert value(registry, "ps_worker_clock", worker=str(MAX_WORKERS)) == 1
    assert "other" in workers_of(registry)

    metrics.remove_worker(MAX_WORKERS + 1)

    assert "other" not in workers_of(registry)


def test_snapshots_record_duration_size_time_and_failures(
    registry: CollectorRegistry, metrics: ServerMetrics
) -> None:
    """Failures are counted by a bounded set of reasons."""
    assert value(registry, "ps_snapshot_last_success_timestamp_seconds") == 0
    before = time.time()
    metrics.record_snapshot(1.5, nbytes=4096)
    metrics.count_snapshot_failure("ENOSPC")
    metrics.count_snapshot_failure("something new")

    assert value(registry, "ps_snapshot_duration_seconds_sum") == 1.5
    assert value(registry, "ps_snapshot_bytes") == 4096
    last = value(registry, "ps_snapshot_last_success_timestamp_seconds")
    assert last is not None
    assert last >= before
    assert value(registry, "ps_snapshot_failures_total", reason="ENOSPC") == 1
    assert value(registry, "ps_snapshot_failures_total", reason="other") == 1

    metrics.set_restored_snapshot(17.0, nbytes=2048)

    assert value(registry, "ps_snapshot_last_success_timestamp_seconds") == 17.0
    assert value(registry, "ps_snapshot_bytes") == 2048
    assert value(registry, "ps_snapshot_duration_seconds_count") == 1


def test_lost_updates_are_counted_with_their_time(
    registry: CollectorRegistry, metrics: ServerMetrics
) -> None:
    """A rollback that loses nothing does not count."""
    metrics.count_lost_updates(0)
    assert value(registry, "ps_updates_lost_timestamp_seconds") == 0
    before = time.time()
    metrics.count_lost_updates(3)
    metrics.count_lost_updates(4)

    assert value(registry, "ps_updates_lost_total") == 7
    assert (value(registry, "ps_updates_lost_timestamp_seconds") or 0) >= before


def test_shards_in_one_process_have_separate_metrics() -> None:
    """One registry each; the same object never has two shards."""
    registries = [new_registry(), new_registry()]
    shards = [ServerMetrics(registry, shard=shard) for shard, registry in enumerate(registries)]
    shards[0].version.set(5)

    assert registries[0].get_sample_value("ps_version", {"shard": "0"}) == 5
    assert registries[1].get_sample_value("ps_version", {"shard": "1"}) == 0


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_metric_names_pass_the_linter_of_prometheus(
    registry: CollectorRegistry, metrics: ServerMetrics
) -> None:
    """python_* and process_* belong to its client and are left out."""
    text = (
        "\n".join(line for line in generate_latest(registry).decode().splitlines() if "ps_" in line)
        + "\n"
    )
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=20
    )

    assert (done.returncode, done.stdout + done.stderr) == (0, "")
