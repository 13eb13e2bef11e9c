"""What is written for TensorBoard: which points, what a rollback hides, and errors of the disk."""

import errno
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import pytest

from pscommon.core.errors import InvalidRequestError
from pscommon.core.metric_row import MetricRow
from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from pscommon.system import event_files
from pscommon.system.event_files import check_tensorboard
from psserver.core.job.policy import policy
from psserver.core.job.trainings import Trainings
from psserver.core.workers.members import WorkerHeartbeat
from psserver.core.workers.reported_values import ReportedValue
from psserver.monitoring.training_curves import (
    RETRY_SECONDS,
    CurveWriter,
    JobSample,
    sample_job,
)
from tests.support.clipped_job import MODEL, ClippedJob
from tests.support.curves import curves
from tests.support.events import events


class Job:
    """A job whose samples a test makes up, until its server ends."""

    def __init__(self, folder: Path) -> None:
        self.writer = CurveWriter(folder, lambda: None)
        self.log_id, self.first, self.now, self.training = 1, 0, 0.0, ""
        self.first_rows: tuple[MetricRow, ...] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.writer.close()

    def roll_back(self, version: int, *rows: MetricRow) -> None:
        """Begin a log with this version and these reported values."""
        self.log_id, self.first, self.first_rows = self.log_id + 1, version, rows

    def sample(
        self, version: int, values: Mapping[str, float] | None = None, *rows: MetricRow
    ) -> None:
        self.now += 1.0
        self.writer.write(
            JobSample(
                self.training, self.log_id, self.first, self.first_rows, version, values or {}, rows
            ),
            self.now,
        )


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path) as job:
        yield job


def row(name: str, version: int, value: float) -> MetricRow:
    return MetricRow(1000.0 + version, version, 1, 0, name, value)


def test_each_reported_value_is_written_once_at_its_own_version(job: Job, tmp_path: Path) -> None:
    job.sample(3, {}, row("loss", 2, 0.5), row("accuracy", 3, 0.25))
    job.sample(9, {}, row("loss", 8, 0.125), row("accuracy", 3, 0.25))

    assert curves(tmp_path) == {"loss": [(2, 0.5), (8, 0.125)], "accuracy": [(3, 0.25)]}


def test_a_measured_value_is_written_for_each_new_version(job: Job, tmp_path: Path) -> None:
    for version, speed in ((3, 100.0), (3, 200.0), (5, 300.0)):
        job.sample(version, {"job/samples_per_second": speed})

    assert curves(tmp_path) == {"job/samples_per_second": [(3, 100.0), (5, 300.0)]}


def test_a_rollback_cuts_the_curves_before_the_first_new_point(job: Job, tmp_path: Path) -> None:
    for version in (1, 50, 100, 150):
        job.sample(version, {"job/staleness": version}, row("loss", version, version))
    before = row("loss", 100, 100)
    job.roll_back(100, before)
    job.sample(100, {}, before)
    valid: list[tuple[int, float]] = [(1, 1.0), (50, 50.0), (100, 100.0)]
    assert curves(tmp_path) == {"loss": valid, "job/staleness": valid}

    job.sample(120, {"job/staleness": 1.0}, row("loss", 120, 2.0))

    assert curves(tmp_path) == {"loss": [*valid, (120, 2.0)], "job/staleness": [*valid, (120, 1.0)]}


def test_a_restart_continues_the_curves(job: Job, tmp_path: Path) -> None:
    job.sample(7, {}, row("loss", 7, 0.5))
    with Job(tmp_path) as again:
        again.roll_back(7)
        again.sample(7)
        again.sample(9, {}, row("loss", 8, 0.25))

    assert curves(tmp_path)["loss"] == [(7, 0.5), (8, 0.25)]


def test_a_job_without_updates_hides_an_earlier_one(job: Job, tmp_path: Path) -> None:
    job.sample(7, {"job/staleness": 0.0}, row("loss", 0, 0.5))
    with Job(tmp_path) as other:
        other.sample(0)

    assert curves(tmp_path) == {}


def test_a_file_comes_behind_those_of_a_machine_with_a_later_clock(
    job: Job, tmp_path: Path
) -> None:
    (tmp_path / "events.out.tfevents.9999999990.other").touch()
    job.sample(1)

    (made,) = tmp_path.glob("*.9999999991.*")
    assert made.stat().st_size > 0


def test_a_value_at_the_version_of_a_restart_is_written(job: Job, tmp_path: Path) -> None:
    """As of a script that only evaluates what an earlier run has trained."""
    job.roll_back(7, row("loss", 7, 0.5))
    job.sample(7, {}, row("loss", 7, 0.5), row("accuracy", 7, 1.0))

    assert curves(tmp_path) == {"accuracy": [(7, 1.0)]}


def test_a_value_of_a_discarded_update_is_not_written(job: Job, tmp_path: Path) -> None:
    job.roll_back(100)
    job.sample(100, {}, row("loss", 140, 1.0))
    job.sample(150, {}, row("loss", 140, 1.0), row("accuracy", 150, 1.0))

    assert curves(tmp_path) == {"accuracy": [(150, 1.0)]}


def test_a_training_begins_without_the_values_of_the_one_before(job: Job, tmp_path: Path) -> None:
    old = row("loss", 900, 1.0)
    job.sample(900, {}, old)
    job.training = "2-fold"
    job.roll_back(0, old)
    job.sample(950, {}, old, row("accuracy", 940, 1.0))

    assert curves(tmp_path / "2-fold") == {"accuracy": [(940, 1.0)]}
    assert curves(tmp_path) == {"loss": [(900, 1.0)]}


def test_numbers_that_are_not_finite_and_a_thousand_names_are_written(
    job: Job, tmp_path: Path
) -> None:
    values = {f"value {number} {'é' * 100}": float(number) for number in range(1000)}
    extreme = {"nan": math.nan, "inf": math.inf, "minus": -math.inf, "huge": 1e300, "": 1.0}
    job.sample(2, {}, *(row(name, 1, value) for name, value in (values | extreme).items()))

    found = curves(tmp_path)
    assert {name: found[name] for name in values} == {
        name: [(1, value)] for name, value in values.items()
    }
    assert math.isnan(found["nan"][0][1])
    assert [found[name][0][1] for name in ("inf", "minus", "huge")] == [
        math.inf,
        -math.inf,
        math.inf,  # points have single precision
    ]


class BrokenDisk:
    """Lets records fail while `is_full`, after some of their bytes are written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tensorboard = pytest.importorskip("tensorboardX")
        self.is_full = False
        disk, write = self, tensorboard.RecordWriter.write

        def write_some(writer: Any, data: bytes) -> None:
            if disk.is_full:
                writer._writer.write(b"torn")
                raise OSError(errno.ENOSPC, "No space left on device")
            write(writer, data)

        monkeypatch.setattr(tensorboard.RecordWriter, "write", write_some)


def test_a_full_disk_warns_once_and_the_curves_go_on_after_it(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    disk = BrokenDisk(monkeypatch)
    job.sample(1, {}, row("loss", 1, 1.0))
    disk.is_full = True
    for version in (2, 3, 4):
        job.sample(version, {}, row("loss", version, 1.0))
        job.now += RETRY_SECONDS
    disk.is_full = False
    job.sample(5, {}, row("loss", 5, 1.0))
    job.sample(6, {}, row("loss", 6, 1.0))

    assert curves(tmp_path) == {"loss": [(1, 1.0), (5, 1.0), (6, 1.0)]}
    assert [event for event in events(caplog) if event] == [
        "tensorboard_unwritable",
        "tensorboard_continued",
    ]
    assert len([*tmp_path.iterdir()]) == 2


def test_a_rollback_while_the_disk_is_full_still_cuts_the_curves(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = BrokenDisk(monkeypatch)
    job.sample(5, {}, row("loss", 5, 1.0))
    disk.is_full = True
    job.roll_back(2)
    job.sample(3)
    disk.is_full = False
    job.now += RETRY_SECONDS
    job.sample(9, {}, row("loss", 9, 2.0))

    assert curves(tmp_path) == {"loss": [(9, 2.0)]}


# ---- the sample ----------------------------------------------------------------------------------


def test_a_sample_of_a_job_that_clips() -> None:
    job = ClippedJob()
    machine, workers = job.machine, [*job.machine.membership]
    job.push(1, 1)
    job.push(2, 1)
    job.measure(4.0, 12.0)
    for member in workers:
        member.heartbeat = WorkerHeartbeat(samples_per_second=100.0)
    machine.reported.take(workers[1], [ReportedValue("loss", 2.0, 0, 7.0)], machine.membership)
    machine.reported.take(workers[0], [ReportedValue("loss", 1.0, 0, 8.0)], machine.membership)

    sample = sample_job(machine, 0, (), [{"lr": 0.5}])

    assert (sample.training, sample.log_id, sample.version) == ("", machine.job.log_id, 1)
    assert sample.values == {
        "job/samples_per_second": 200.0,
        "job/staleness": 0.0,
        "job/staleness_max": 0,
        "job/gradient_norm": 4.0,
        "job/learning_rate": 0.5,
    }
    assert sample.rows == [MetricRow(8.0, 0, workers[0].worker, 0, "loss", 1.0)]


def test_without_a_clip_norm_the_norm_is_that_of_the_greatest_push() -> None:
    plain = ModelSpec(MODEL.tensors, OptimizerSettings("sgd", ({"lr": 0.1},)))
    job = ClippedJob(model=plain, max_norm=1e9)
    job.push(1, 1, (4.0, 12.0))
    job.push(2, 1, (4.0, 5.0))

    assert sample_job(job.machine, 0, (), ()).values["job/gradient_norm"] == 4.0


def test_the_staleness_is_that_of_the_newest_push_of_each_worker() -> None:
    plain = ModelSpec(MODEL.tensors, OptimizerSettings("sgd", ({"lr": 0.1},)))
    job = ClippedJob(policy("async"), model=plain)
    job.push(1, 1)
    job.push(1, 2)
    job.push(1, 3)
    job.push(2, 1)

    values = sample_job(job.machine, 0, (), ()).values
    assert (values["job/staleness"], values["job/staleness_max"]) == (2.5, 3)
    assert "job/gradient_norm" not in values


def test_several_optimizers_and_groups_have_curves_of_their_own() -> None:
    groups = ({"lr": 0.1}, {"lr": 0.2})
    tensors = (TensorSpec("w", (2,), "float32"), TensorSpec("v", (2,), "float32"))
    optimizers = {"a": OptimizerSettings("sgd", groups[:1]), "b": OptimizerSettings("sgd", groups)}
    machine = ClippedJob().machine
    machine.job.model = ModelSpec(tensors, optimizers)

    values = sample_job(machine, 0, (), [{"lr": 0.5}, {"lr": 0.25}, {"momentum": 0.9}]).values

    assert values == {"job/learning_rate/a": 0.5, "job/learning_rate/b/group_0": 0.25}


def test_a_later_training_has_a_folder_of_its_own() -> None:
    machine = ClippedJob().machine
    machine.job.trainings = Trainings("../fold 2", ("first",))

    assert sample_job(machine, 0, (), ()).training == "2-..%2Ffold%202"


# ---- the folder ----------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(InvalidRequestError, match=r"cannot be written: .*Try: another directory"):
        check_tensorboard(tmp_path / "file" / "curves")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_files, "find_spec", lambda name: None)

    with pytest.raises(InvalidRequestError, match=r"pip install 'paramserver\[tensorboard\]'"):
        check_tensorboard(tmp_path)


def test_the_package_is_imported_by_the_first_file_only() -> None:
    code = "import pscommon.system.event_files, sys; print('tensorboardX' in sys.modules)"

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)

    assert result.stdout == b"False\n"
