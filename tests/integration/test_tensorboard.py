"""The curves of real servers, read with TensorBoard's own reader."""

import logging
import math
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from psserver.monitoring import training_curves
from psworker import Client, Job
from tests.support.cluster import Cluster
from tests.support.curves import Curve, curves
from tests.support.data_training import train
from tests.support.events import records_of
from tests.support.settings_coverage import server_setting
from tests.support.settings_server import Serve
from tests.support.small_disk import SmallDisk, missing
from tests.support.workers import count, counter, joined, status, until

Make = Callable[..., Cluster]


@pytest.fixture(autouse=True)
def frequent_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_curves, "SAMPLE_SECONDS", 0.02)


def steps(curve: Curve) -> list[int]:
    return [step for step, _ in curve]


def wait_for(folder: Path, tag: str, step: int) -> Curve:
    """Wait until a curve has a point of this step or a later one; return the curve."""

    def found() -> Curve | None:
        curve = curves(folder).get(tag, [])
        return curve if curve and curve[-1][0] >= step else None

    return until(found, f"{tag} at step {step}")  # type: ignore[return-value]


@server_setting("tensorboard")
def test_shard_0_writes_and_other_shards_do_not(serve: Serve, tmp_path: Path) -> None:
    first = serve("--shard", "0/2", "--tensorboard", tmp_path / "first", "--max-norm", 1e9)
    serve("--shard", "1/2", "--join", first.address, "--tensorboard", tmp_path / "second")
    with counter(first.address) as client:
        count(client, 3)
        wait_for(tmp_path / "first", "job/gradient_norm", 3)
        found = curves(tmp_path / "first")

    assert found["job/learning_rate"][-1] == (3, 1.0)
    assert found["job/gradient_norm"][-1][1] == pytest.approx(math.sqrt(220))
    assert found["job/staleness"][-1] == found["job/staleness_max"][-1] == (3, 2.0)
    assert not (tmp_path / "second").exists()


def test_the_speed_of_a_job_is_that_of_the_status(cluster: Make, tmp_path: Path) -> None:
    made = cluster(tensorboard=tmp_path, lease=0.5)
    with closing(joined(made.address)) as job:
        train(job, lambda step: step != 20 or until(lambda: speed(made.address), "a heartbeat"))
        curve = wait_for(tmp_path, "job/samples_per_second", 21)
        assert (curve[-1][1] > 0, speed(made.address) > 0) == (True, True)


def speed(address: str) -> float:
    found: float = status(address)["progress"]["samples_per_second"]
    return found


def test_a_rollback_cuts_the_curves_and_a_restart_continues_them(
    cluster: Make, tmp_path: Path
) -> None:
    folder, options = tmp_path / "curves", {"data_dir": tmp_path / "data"}
    made = cluster(2, tensorboard=folder, **options)
    with counter(made.address) as client:
        report(client, folder, 1, 2, 3)
        made.servers[0].service.snapshot_scheduler.save(30.0)  # type: ignore[union-attr]
        report(client, folder, 4, 5)
        assert curves(folder)["loss"] == [(step, 0.5**step) for step in (1, 2, 3, 4, 5)]

        made.servers[0].service.restore(3, 30.0)  # type: ignore[union-attr]

        until(lambda: steps(curves(folder)["loss"])[-1] == 3, "a cut")
        assert steps(curves(folder)["loss"]) == [1, 2, 3]
        assert steps(curves(folder)["job/learning_rate"]) == [1, 2, 3]
        with counter(made.address) as again:
            report(again, folder, 4)
    made.stop()

    made = cluster(2, tensorboard=folder, **options)
    with counter(made.address) as client:
        report(client, folder, 5)
    assert steps(curves(folder)["loss"]) == [1, 2, 3, 4, 5]
    made.close()

    resumed = cluster(2, tensorboard=folder, resume=3, **options)
    until(lambda: status(resumed.address)["version"] == 3, "the older snapshot")
    until(lambda: steps(curves(folder)["loss"]) == [1, 2, 3], "a cut")


def report(client: Client, folder: Path, *versions: int) -> None:
    """Make a step for each of these versions, and report a loss there."""
    for version in versions:
        count(client)
        client.report(loss=0.5**version)
        wait_for(folder, "loss", version)
        wait_for(folder, "job/learning_rate", version)


def test_the_last_values_of_a_job_are_written(cluster: Make, tmp_path: Path) -> None:
    made = cluster(tensorboard=tmp_path)
    with counter(made.address) as client, closing(Job(client)) as job:
        count(client)
        client.pull()
        job.report(loss=0.5, nan=math.nan)
    made.close()

    assert curves(tmp_path)["loss"] == [(1, 0.5)]
    assert math.isnan(curves(tmp_path)["nan"][0][1])


def test_training_goes_on_when_the_disk_is_full(
    cluster: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if why := missing(tmp_path):
        pytest.skip(why)
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(training_curves, "RETRY_SECONDS", 0.1)
    with SmallDisk(tmp_path / "disk", 1 << 20) as disk:
        folder = disk.path / "curves"
        made = cluster(tensorboard=folder)
        with counter(made.address) as client:
            count(client)
            wait_for(folder, "job/learning_rate", 1)
            disk.fill()
            until(lambda: count(client) or written(caplog, "unwritable"), "a warning")
            for _ in range(5):
                count(client)
            disk.free()
            until(lambda: count(client) or written(caplog, "continued"), "a free disk")
            version = status(made.address)["version"]
            count(client)
            found = wait_for(folder, "job/learning_rate", version + 1)
        made.close()

    assert steps(found)[0] == 1
    assert steps(found) == sorted({*steps(found)})
    assert (written(caplog, "unwritable"), written(caplog, "continued")) == (1, 1)


def written(caplog: pytest.LogCaptureFixture, event: str) -> int:
    """Return how often the event was logged."""
    return len(records_of(caplog, f"tensorboard_{event}"))
