"""The curves of a job for TensorBoard (`--tensorboard`), written by shard 0.

Theory of operation. Once a second a thread of its own takes a sample of the job, for which it needs
the coordinator's lock for a moment, and writes what is new. The step of a point is a version.

States of the writer: no log of the job seen, writing, failed. Events: a sample, an error of the
disk, the end of the server.

Invariants:

- Each log of the job begins with a file that hides all points after the version with which the log
  began: they belong to updates that a rollback, or a start from an older snapshot, has discarded.
- A file that a failed write has broken gets no further point. A new file continues after it.
- Each reported value is written once, by the process that saw it first.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, islice
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from pscommon.core.metric_row import MetricRow
from pscommon.system.event_files import EventFile
from pscommon.telemetry.logs import get_logger
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.monitoring.pass_progress import samples_per_second

SAMPLE_SECONDS = 1.0
RETRY_SECONDS = 10.0
"""Time between two attempts to open a file after an error."""

CLOSE_SECONDS = 5.0
"""Time that the end of a server waits for the last points: a network file system may hang."""

MAX_NAME_CHARACTERS = 80

log = get_logger(__name__)


class JobSample(NamedTuple):
    """What the curves show of one moment.

    training: name of the folder of the current training; empty for the job's first one.
    log_id: id of the job's log.
    first_version, first_rows: version and reported values with which this log began.
    version: newest version.
    values: measured values by tag.
    rows: newest value of each reported name.
    """

    training: str
    log_id: int
    first_version: int
    first_rows: Sequence[MetricRow]
    version: int
    values: Mapping[str, float]
    rows: Sequence[MetricRow]


class OptimizerRow(NamedTuple):
    """What the newest update of an optimizer used.

    optimizer: its name; empty if the model has only one.
    gradient_norm: before clipping; None where the job does not compute it.
    learning_rates: by parameter group; None for a group without one.
    """

    optimizer: str
    gradient_norm: float | None
    learning_rates: list[float | None]


def optimizer_rows(
    coordinator: CoordinatorMachine, groups: Sequence[Mapping[str, Any]]
) -> list[OptimizerRow]:
    """Return a row for each optimizer of the model.

    groups: Current hyper-parameters of all parameter groups of the model.
    """
    job, remaining = coordinator.job, iter(groups)
    return [
        OptimizerRow(
            optimizer,
            job.gradient_norms.get(optimizer),
            [
                float(rate) if isinstance(rate := group.get("lr"), Real) else None
                for group in islice(remaining, len(settings.groups))
            ],
        )
        for optimizer, settings in (job.model.optimizers.items() if job.model is not None else ())
    ]


def sample_job(
    coordinator: CoordinatorMachine,
    first_version: int,
    first_rows: Sequence[MetricRow],
    groups: Sequence[Mapping[str, Any]],
) -> JobSample:
    """Return a sample. The caller guarantees that the coordinator does not change.

    Args:
        coordinator: The job's coordinator.
        first_version, first_rows: As in JobSample.
        groups: Current hyper-parameters of all parameter groups of the model.
    """
    job, values = coordinator.job, dict[str, float]()
    if speed := samples_per_second(coordinator):
        values["job/samples_per_second"] = speed
    found = [m.staleness for m in coordinator.membership.registered() if m.staleness is not None]
    if found:
        values["job/staleness"] = sum(found) / len(found)
        values["job/staleness_max"] = max(found)
    for row in optimizer_rows(coordinator, groups):
        if row.gradient_norm is not None:
            values[_tag("job/gradient_norm", row.optimizer)] = row.gradient_norm
        for index, rate in enumerate(row.learning_rates):
            part = f"group_{index}" if len(row.learning_rates) > 1 else ""
            if rate is not None:
                values[_tag("job/learning_rate", row.optimizer, part)] = rate
    names = job.trainings
    training = f"{len(names.finished) + 1}-{quote(names.current, safe='')}"[:MAX_NAME_CHARACTERS]
    return JobSample(
        training if names.finished else "",
        job.log_id,
        first_version,
        first_rows,
        job.version,
        values,
        coordinator.reported.latest_rows(),
    )


def _tag(*parts: str) -> str:
    return "/".join(part for part in parts if part)


class CurveWriter:
    """Writes the curves of a job; the text of the module describes it.

    Args:
        folder: `--tensorboard`.
        sample: Returns a sample; None before the job's log has begun.
    """

    def __init__(self, folder: Path, sample: Callable[[], JobSample | None]) -> None:
        self._folder, self._sample = folder, sample
        self._file: EventFile | None = None
        self._log_id: int | None = None
        self._purge_step = 0  # of the next file
        self._written_version = 0  # of the newest measured values
        self._seen: dict[str, MetricRow] = {}
        self._has_failed, self._retry_at = False, 0.0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tensorboard", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Write what is new, at most for CLOSE_SECONDS."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._close_file()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing.wait(SAMPLE_SECONDS)
            if (sample := self._sample()) is not None:
                self.write(sample, time.monotonic())

    def write(self, sample: JobSample, now: float) -> None:
        """Write what is new in the sample. Log an error of the disk once, until it is over.

        now: Monotonic time in seconds.
        """
        if sample.log_id != self._log_id:
            self._begin_log(sample)
        rows, values = self._take_new(sample)
        if self._file is None and now < self._retry_at:
            return
        try:
            file = self._file = self._file or EventFile(
                self._folder / sample.training, self._purge_step
            )
            for (version, at), group in groupby(rows, key=lambda row: (row.version, row.time)):
                file.write(version, at, {row.name: row.value for row in group})
            if values:
                file.write(sample.version, time.time(), values)
            if rows or values:
                file.flush()
        except OSError as error:
            self._fail(error, now)
        else:
            self._purge_step = sample.version + 1
            if self._has_failed:
                self._has_failed = False
                log.info("tensorboard_continued", folder=str(self._folder))

    def _begin_log(self, sample: JobSample) -> None:
        self._close_file()
        self._log_id, self._retry_at = sample.log_id, 0.0
        self._seen = {row.name: row for row in sample.first_rows}
        # a job that begins without updates hides an earlier job, its values at version 0 included
        self._purge_step = sample.first_version + 1 if sample.first_version else 0
        self._written_version = sample.first_version

    def _take_new(self, sample: JobSample) -> tuple[list[MetricRow], Mapping[str, float]]:
        """Return what was not returned before.

        A worker may report a value of an update that a rollback has discarded.
        """
        rows = [
            row
            for row in sample.rows
            if row != self._seen.get(row.name) and row.version <= sample.version
        ]
        rows.sort(key=lambda row: (row.version, row.time))
        self._seen = {row.name: row for row in sample.rows}
        has_updates = sample.version != self._written_version
        self._written_version = sample.version
        return rows, sample.values if has_updates else {}

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def _fail(self, error: OSError, now: float) -> None:
        self._close_file()
        self._retry_at = now + RETRY_SECONDS
        if not self._has_failed:
            self._has_failed = True
            log.warning(
                "tensorboard_unwritable",
                folder=str(self._folder),
                problem=str(error),
                effect="the curves have a gap; training goes on",
                remedy="free space on this disk; the curves then continue by themselves",
            )
