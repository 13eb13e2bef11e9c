"""A log that reports failures instead of raising them, and describes its own condition
correctly.
"""

import errno
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from pscommon.core.errors import SnapshotError
from pscommon.wal.log import LogDamagedError, LogFiles
from psserver.durability.best_effort_log import BestEffortLog
from tests.support.disk_operations import Operations, failing
from tests.support.events import events

FOR_GOOD = 1 << 30


class ReportedFailures(list[str]):
    """The reasons of failures, in order."""


@pytest.fixture
def failures() -> ReportedFailures:
    return ReportedFailures()


@pytest.fixture
def log(tmp_path: Path, failures: ReportedFailures) -> BestEffortLog:
    return BestEffortLog(tmp_path / "log", "no", failures.append)


@pytest.fixture
def disk_failure(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Operations]:
    """From its call on the disk is full, until it is healed."""

    def now() -> Operations:
        disk = Operations(1, FOR_GOOD, failing(errno.ENOSPC))
        disk.install(monkeypatch.setattr)
        return disk

    return now


def kinds(log: BestEffortLog, version: int | None = None) -> list[int]:
    return [record.kind for record in log.records_since(version)]


def test_appended_records_are_read_back(log: BestEffortLog, failures: ReportedFailures) -> None:
    log.begin_segment(0, [(1, b"base", ())])
    log.append(2, b"more")

    assert (kinds(log), log.is_complete, log.is_broken, failures) == ([1, 2], True, False, [])


def test_the_log_since_a_snapshot_starts_at_the_last_segment_of_its_version(
    log: BestEffortLog, disk_failure: Callable[[], Operations]
) -> None:
    """An earlier one may be truncated; the last one begins with the whole state."""
    log.begin_segment(0, [(1, b"base", ())])
    log.begin_segment(2, [(2, b"at the snapshot", ())])
    disk = disk_failure()
    log.append(3, b"does not fit")
    disk.heal()
    log.begin_segment(2, [(4, b"mended", ())])
    log.append(5, b"more")
    log.begin_segment(7, [(6, b"later", ())])

    assert kinds(log, 2) == [4, 5, 6]
    assert kinds(log, 1) == [2, 4, 5, 6]
    assert kinds(log) == [1, 2, 4, 5, 6]


def test_a_log_that_has_not_begun_writes_nothing_and_is_not_failed(
    log: BestEffortLog, failures: ReportedFailures
) -> None:
    log.append(2, b"too early")

    assert (kinds(log), log.is_complete, log.is_broken, failures) == ([], False, False, [])


def test_a_failed_append_is_reported_once_and_ends_the_segment(
    log: BestEffortLog,
    failures: ReportedFailures,
    disk_failure: Callable[[], Operations],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Later records would make no sense without it."""
    log.begin_segment(0, [(1, b"base", ())])
    disk = disk_failure()
    log.append(2, b"lost")
    tried = len(disk.seen)
    disk.heal()
    log.append(3, b"not even tried")

    assert (failures, log.is_complete, log.is_broken) == (["ENOSPC"], False, True)
    assert len(disk.seen) == tried
    assert 3 not in kinds(log)
    assert [r.levelno for r in caplog.records] == [logging.ERROR]


def test_every_failure_is_counted_but_one_error_is_logged(
    log: BestEffortLog,
    failures: ReportedFailures,
    disk_failure: Callable[[], Operations],
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk_failure()
    for version in range(5):
        log.begin_segment(version, [(1, b"base", ())])

    assert failures == ["ENOSPC"] * 5
    assert [r.levelno for r in caplog.records] == [logging.ERROR]


def test_begin_repairs_a_failed_log_and_reports_it(
    log: BestEffortLog, disk_failure: Callable[[], Operations], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    log.begin_segment(0, [(1, b"base", ())])
    disk = disk_failure()
    log.append(2, b"lost")
    disk.heal()
    log.begin_segment(4, [(1, b"base", ())])
    log.append(5, b"kept")

    assert (log.is_complete, log.is_broken, kinds(log, 4)) == (True, True, [1, 5])
    log.remove_before(3)
    assert log.is_broken
    log.remove_before(4)
    assert not log.is_broken
    assert events(caplog)[1:] == ["log_writable_again"]


def test_a_failed_begin_ends_the_previous_segment(
    log: BestEffortLog, failures: ReportedFailures, disk_failure: Callable[[], Operations]
) -> None:
    """Later records depend on a state that is not on disk."""
    log.begin_segment(0, [(1, b"base", ())])
    disk = disk_failure()
    log.begin_segment(2, [(1, b"base", ())])
    disk.heal()
    log.append(2, b"after the state of version 2")

    assert (kinds(log), failures, log.is_broken) == ([1], ["ENOSPC"], True)


def test_after_clear_nothing_is_appended_until_begin(
    log: BestEffortLog, failures: ReportedFailures, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    log.begin_segment(7, [(1, b"base", ())])
    log.clear()
    log.append(2, b"of a history that is over")
    assert (kinds(log), log.is_complete, log.is_broken) == ([], False, False)

    log.begin_segment(3, [(1, b"base", ())])  # a name may be smaller than before clear
    log.append(4, b"kept")

    assert (kinds(log), failures, caplog.records) == ([1, 4], [], [])


def test_a_folder_that_cannot_be_listed_is_reported(
    tmp_path: Path, failures: ReportedFailures
) -> None:
    log = BestEffortLog(tmp_path / "log", "no", failures.append)
    (tmp_path / "log").touch()

    log.begin_segment(0, [(1, b"base", ())])

    assert (failures, log.is_broken) == (["ENOTDIR"], True)


def test_segments_of_one_version_are_retained_in_order(log: BestEffortLog) -> None:
    for kind in range(1, 4):
        log.begin_segment(6, [(kind, b"base", ())])

    assert kinds(log) == [1, 2, 3]
    assert kinds(log, 6) == [3]
    assert kinds(log, 7) == []


def test_a_segment_that_cannot_be_retired_is_no_failure(
    log: BestEffortLog,
    failures: ReportedFailures,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    log.begin_segment(0, [(1, b"base", ())])
    log.begin_segment(2, [(1, b"base", ())])
    with monkeypatch.context() as patch:
        patch.setattr(LogFiles, "rename", lambda *_: failing(errno.EIO)(None, None, ()))  # type: ignore[arg-type]
        log.remove_before(2)
    log.append(2, b"goes on")

    assert (kinds(log, 2), failures, log.is_complete) == ([1, 2], [], True)
    assert [r.levelno for r in caplog.records] == [logging.WARNING]


def test_after_close_nothing_is_written(
    tmp_path: Path, log: BestEffortLog, failures: ReportedFailures
) -> None:
    """A late call must not begin a segment that lacks records."""
    log.begin_segment(0, [(1, b"base", ())])
    log.close()
    log.append(2, b"late")
    log.begin_segment(1, [(1, b"late", ())])

    assert (kinds(log), failures) == ([1], [])


def test_a_segment_without_a_record_is_damaged(
    tmp_path: Path, log: BestEffortLog, failures: ReportedFailures
) -> None:
    """Its first records were on disk before it got its name."""
    log.begin_segment(5, [(1, b"base", ())])
    log.close()
    path = tmp_path / "log" / "000000000005-0000.log"
    path.write_bytes(path.read_bytes()[:30])

    with pytest.raises(LogDamagedError, match="no complete record"):
        kinds(log, 5)


def test_an_unreadable_log_is_reported(tmp_path: Path, failures: ReportedFailures) -> None:
    (tmp_path / "log").write_text("no folder")

    with pytest.raises(SnapshotError, match="Not a directory"):
        BestEffortLog(tmp_path / "log", "no", failures.append)


def test_a_log_of_another_user_is_reported_and_not_removed(
    tmp_path: Path, log: BestEffortLog, failures: ReportedFailures, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.begin_segment(0, [(1, b"base", ())])
    log.close()

    def refused(path: Path, mode: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refused)
        with pytest.raises(SnapshotError, match="Permission denied"):
            BestEffortLog(tmp_path / "log", "no", failures.append)
    assert kinds(BestEffortLog(tmp_path / "log", "no", failures.append)) == [1]
