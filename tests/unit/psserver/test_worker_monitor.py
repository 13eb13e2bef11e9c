"""Log lines about slow workers and their rate limit."""

import logging
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry

from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.job.policy import policy
from psserver.core.job.settings import JobRules
from psserver.core.workers.health import WorkerCondition, WorkerHealth
from psserver.core.workers.members import WorkerHeartbeat, WorkerState
from psserver.monitoring.worker_monitor import CONFIRM_SECONDS, LOG_INTERVAL_SECONDS, WorkerMonitor
from psserver.process.metrics import ServerMetrics
from tests.support.events import event_key, events

Log = pytest.LogCaptureFixture
SLOW, LIVE, SILENT = (
    WorkerCondition(WorkerHealth.SLOW, 1.23456, 0.1),
    WorkerCondition(WorkerHealth.LIVE, 0.1, 0.1),
    WorkerHealth.SILENT,
)


@dataclass
class WatchedWorker:
    """One worker that is checked every 0.2 seconds."""

    coordinator: CoordinatorMachine = field(
        default_factory=lambda: CoordinatorMachine(1, JobRules(policy("sync")))
    )
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    now: float = 100.0

    def __post_init__(self) -> None:
        self.watch = WorkerMonitor(ServerMetrics(self.registry, shard=0), 0.0)
        self.membership = self.coordinator.membership
        self.member = self.membership.join(0.0, 7, "host-a", 1, "cpu")

    def pass_by(self, seconds: float, *conditions: WorkerCondition) -> None:
        """Pass these seconds, during which each check finds the next of these conditions."""
        for check in range(round(seconds / 0.2)):
            found = {
                member.worker: conditions[check % len(conditions)]
                for member in self.membership.current()
            }
            self.watch.update(self.coordinator, found, "", self.now)
            self.now += 0.2


@pytest.fixture
def scene(caplog: Log) -> WatchedWorker:
    caplog.set_level(logging.INFO)
    return WatchedWorker()


def test_a_slow_worker_is_logged_once_and_again_when_it_recovers(
    scene: WatchedWorker, caplog: Log
) -> None:
    scene.pass_by(60.0, SLOW)
    (record,) = caplog.records
    logged = {
        key: record.__dict__[key]
        for key in ("worker", "rank", "host", "step_seconds", "median_seconds")
    }
    assert (record.levelname, event_key(record)) == ("WARNING", "worker_slow")
    assert logged == {
        "worker": 1,
        "rank": 7,
        "host": "host-a",
        "step_seconds": 1.23,
        "median_seconds": 0.1,
    }

    scene.pass_by(60.0, LIVE)

    assert events(caplog) == ["worker_slow", "worker_recovered"]


def test_a_short_slow_period_is_not_logged(scene: WatchedWorker, caplog: Log) -> None:
    scene.pass_by(60.0, SLOW, SLOW, SLOW, LIVE)
    assert events(caplog) == []

    scene.pass_by(CONFIRM_SECONDS + 0.4, SLOW)

    assert events(caplog) == ["worker_slow"]


def test_an_alternating_worker_is_logged_every_ten_seconds(
    scene: WatchedWorker, caplog: Log
) -> None:
    changing = [SLOW] * 20 + [LIVE] * 20
    scene.pass_by(120.0, *changing)

    assert 2 <= len(events(caplog)) <= 120.0 / LOG_INTERVAL_SECONDS
    assert events(caplog)[:2] == ["worker_slow", "worker_recovered"]


def test_a_silent_or_departed_worker_is_not_logged(scene: WatchedWorker, caplog: Log) -> None:
    scene.pass_by(CONFIRM_SECONDS + 1.0, SLOW)
    scene.pass_by(60.0, WorkerCondition(SILENT, 1.0, 0.1))
    scene.membership.remove(scene.member, WorkerState.LOST, "its lease ended")
    scene.pass_by(60.0, SLOW)

    assert events(caplog) == ["worker_slow"]


def test_the_time_of_the_last_push_ends_with_its_worker(
    scene: WatchedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarantine, for example, is known to the membership alone."""
    monkeypatch.setattr("prometheus_client.metrics.time.time", lambda: scene.now)

    def logged() -> float | None:
        labels = {"shard": "0", "worker": str(scene.member.worker)}
        return scene.registry.get_sample_value("ps_worker_last_push_timestamp_seconds", labels)

    scene.membership.index.set_state(scene.member, WorkerState.ACTIVE)
    scene.pass_by(1.0, LIVE)
    assert logged() is None

    scene.member.steps, pushed = 1, scene.now
    scene.pass_by(5.0, LIVE)
    assert logged() == pushed

    scene.membership.remove(scene.member, WorkerState.LOST, "quarantined")
    scene.pass_by(0.2, LIVE)
    assert logged() is None


def test_a_worker_without_calls_is_logged_with_the_seconds(
    scene: WatchedWorker, caplog: Log
) -> None:
    scene.member.heartbeat = WorkerHeartbeat(no_call_seconds=41.7)
    scene.pass_by(5.0, WorkerCondition(WorkerHealth.HANGING, 41.7, 0.1))
    scene.pass_by(20.0, LIVE)

    assert events(caplog) == ["worker_hanging", "worker_recovered"]
    assert caplog.records[0].__dict__["no_call_seconds"] == 41.7
