"""How many workers a job wants: the command, its record, status and metric."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pscommon.core.errors import InvalidRequestError
from pscommon.settings.values import WorkerBounds
from psserver.core.job.worker_scaling import Decision, WorkerScaling
from psworker.ctl.cli import main as ps_ctl
from psworker.ctl.job_client import CoordinatorClient
from tests.support.cluster import Cluster
from tests.support.ctl_output import ctl
from tests.support.events import records_of
from tests.support.programs import Programs, programs_in
from tests.support.settings_coverage import server_setting, worker_setting
from tests.support.workers import count, counter, status, until

Make = Callable[..., Cluster]
Output = pytest.CaptureFixture[str]


ROOT = Path(__file__).parents[2]

NOTICED = """
import threading, psworker
from tests.support.data_training import train
with psworker.connect() as job:
    def each(step):
        if step == 3:
            print("waits for the notice", flush=True)
            while not job.stopping:
                threading.Event().wait(0.01)
    train(job, each)
print("end", flush=True)
"""


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with programs_in(tmp_path) as programs:
        yield programs


def wanted_metric(servers: Cluster) -> float | None:
    registry = servers.servers[0].metrics.registry
    return registry.get_sample_value("ps_workers_wanted", {"shard": "0"})


def scale(servers: Cluster, workers: int) -> None:
    with CoordinatorClient([servers.address], 10.0) as asked:
        asked.scale_workers(workers)


def test_the_number_is_in_status_metric_and_log(
    cluster: Make, capsys: Output, caplog: pytest.LogCaptureFixture
) -> None:
    servers = cluster(1)
    caplog.set_level("INFO", "psserver")
    assert status(servers.address)["workers_wanted"] is None
    assert wanted_metric(servers) is None

    found = ctl(capsys, "--ps", servers.address, "scale", "workers", 3)

    assert found["workers_wanted"] == 3
    assert status(servers.address)["workers_wanted"] == 3
    until(lambda: wanted_metric(servers) == 3, "the metric")
    (record,) = records_of(caplog, "workers_wanted")
    assert (record.__dict__["workers"], record.__dict__["reason"]) == (3, "ps-ctl scale")


def test_fewer_workers_than_training_starts_with_are_refused_before_its_start(
    cluster: Make, capsys: Output
) -> None:
    servers = cluster(1, min_workers=2)

    with pytest.raises(InvalidRequestError, match="--min-workers"):
        scale(servers, 1)
    assert ps_ctl(["--ps", servers.address, "scale", "workers", "1"]) == 2
    assert "Try" in capsys.readouterr().err
    assert status(servers.address)["workers_wanted"] is None


@pytest.mark.parametrize("durability", ["snapshot", "log"])
def test_restarted_servers_want_the_same_number(
    cluster: Make, tmp_path: Path, durability: str
) -> None:
    settings = {"data_dir": tmp_path, "durability": durability}
    servers = cluster(2, **settings)
    with counter(servers.address) as client:
        count(client, 1)
        scale(servers, 3)
        with CoordinatorClient([servers.address], 10.0) as asked:
            asked.save(10.0)
        servers.close()

    assert status(cluster(2, **settings).address)["workers_wanted"] == 3


@pytest.mark.parametrize("durability", ["snapshot", "log"])
def test_a_new_run_does_not_want_the_number_of_the_last_one(
    cluster: Make, tmp_path: Path, durability: str
) -> None:
    settings = {"data_dir": tmp_path, "durability": durability}
    servers = cluster(2, **settings)
    with counter(servers.address) as client:
        count(client, 1)
        scale(servers, 3)
    servers.stop()

    assert status(cluster(2, **settings).address)["workers_wanted"] is None


def test_a_rollback_does_not_change_the_number(cluster: Make, tmp_path: Path) -> None:
    servers = cluster(2, data_dir=tmp_path)
    with counter(servers.address) as client:
        count(client, 1)
        with CoordinatorClient([servers.address], 10.0) as asked:
            version, _ = asked.save(10.0)
            asked.scale_workers(3)
            asked.restore(version, 10.0)

    assert status(servers.address)["workers_wanted"] == 3


def test_every_policy_takes_the_number(cluster: Make) -> None:
    for settings in ({"policy": "async"}, {"policy": "ssp", "staleness": 1}):
        servers = cluster(1, **settings)
        scale(servers, 5)
        assert status(servers.address)["workers_wanted"] == 5


@server_setting("scale_workers")
def test_a_number_beyond_the_bounds_is_corrected(
    cluster: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """The policy itself is simulated (tests/sim/test_scaling.py)."""
    caplog.set_level("INFO", "psserver")
    servers = cluster(1, policy="async", scale_workers=WorkerBounds(2, 3))
    with counter(servers.address) as client:
        count(client, 1)
        until(lambda: status(servers.address)["workers_wanted"] == 2, "the least number")
        scale(servers, 7)
        until(lambda: status(servers.address)["workers_wanted"] == 3, "the largest number")

    reasons = [record.__dict__["reason"] for record in records_of(caplog, "workers_wanted")]
    assert reasons == ["the bounds are 2 and 3", "ps-ctl scale", "the bounds are 2 and 3"]


def test_a_straggler_is_asked_to_leave_as_the_number_changes(
    cluster: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = cluster(1, policy="async")
    service = servers.servers[0].service
    assert service is not None
    with counter(servers.address) as first, counter(servers.address) as second:
        count(first, 1)
        count(second, 1)
        policy = WorkerScaling(1, 2)
        decision = Decision(1, "a test", second.worker)
        monkeypatch.setattr(policy, "observe", lambda seen, now: decision)
        with service.executor.step() as (recorder, now):
            assert recorder.scale(policy, now) == decision
        found = status(servers.address)

    assert found["workers_wanted"] == 1
    assert [row["draining"] for row in found["workers"]] == [False, True]


@worker_setting("preemption_notice")
def test_a_preempted_worker_leaves_after_its_step(cluster: Make, programs: Programs) -> None:
    address, notice = cluster(1).address, programs.folder / "preempted"
    worker = programs.fork(
        *("ps-worker", "--ps", address, "--preemption-notice", notice),
        programs.script(NOTICED),
        PYTHONPATH=f"{ROOT}:{ROOT / 'common'}",
    )
    worker.wait_for("waits for the notice")

    notice.touch()

    assert worker.wait() == 0, worker.output
    assert "end" not in worker.out
    rows = status(address)["workers"]
    assert {row["state"] for row in rows} == {"left"}
    assert max(row["steps"] for row in rows) == 4
