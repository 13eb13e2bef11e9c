"""A log whose failures are told, not raised; what it says of itself is true."""

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


class Told(list[str]):
    """The reasons of failures, in order."""


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def log(tmp_path: Path, told: Told) -> BestEffortLog:
    return BestEffortLog(tmp_path / "log", "no", told.append)


@pytest.fixture
def breaks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Operations]:
    """From its call on the disk is full, until it is healed."""

    def now() -> Operations:
        disk = Operations(1, FOR_GOOD, failing(errno.ENOSPC))
        disk.install(monkeypatch.setattr)
        return disk

    return now


def kinds(log: BestEffortLog, version: int | None = None) -> list[int]:
    return [record.kind for record in log.since(version)]


def test_what_is_appended_is_read_again(log: BestEffortLog, told: Told) -> None:
    log.begin(0, [(1, b"base", ())])
    log.append(2, b"more")

    assert (kinds(log), log.whole, log.broken, told) == ([1, 2], True, False, [])


def test_since_a_snapshot_is_since_the_last_segment_of_its_version(
    log: BestEffortLog, breaks: Callable[[], Operations]
) -> None:
    """One before it may have been cut short; the last one begins with all that there was then."""
    log.begin(0, [(1, b"base", ())])
    log.begin(2, [(2, b"at the snapshot", ())])
    disk = breaks()
    log.append(3, b"does not fit")
    disk.heal()
    log.begin(2, [(4, b"mended", ())])
    log.append(5, b"more")
    log.begin(7, [(6, b"later", ())])

    assert kinds(log, 2) == [4, 5, 6]
    assert kinds(log, 1) == [2, 4, 5, 6]
    assert kinds(log) == [1, 2, 4, 5, 6]


def test_before_it_is_begun_nothing_is_written_or_wrong(log: BestEffortLog, told: Told) -> None:
    log.append(2, b"too early")

    assert (kinds(log), log.whole, log.broken, told) == ([], False, False, [])


def test_a_failed_append_is_told_once_and_ends_the_segment(
    log: BestEffortLog,
    told: Told,
    breaks: Callable[[], Operations],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What came after it would make no sense without it."""
    log.begin(0, [(1, b"base", ())])
    disk = breaks()
    log.append(2, b"lost")
    tried = len(disk.seen)
    disk.heal()
    log.append(3, b"not even tried")

    assert (told, log.whole, log.broken) == (["ENOSPC"], False, True)
    assert len(disk.seen) == tried
    assert 3 not in kinds(log)
    assert [r.levelno for r in caplog.records] == [logging.ERROR]


def test_every_failure_counts_but_one_error_is_said(
    log: BestEffortLog,
    told: Told,
    breaks: Callable[[], Operations],
    caplog: pytest.LogCaptureFixture,
) -> None:
    breaks()
    for version in range(5):
        log.begin(version, [(1, b"base", ())])

    assert told == ["ENOSPC"] * 5
    assert [r.levelno for r in caplog.records] == [logging.ERROR]


def test_begin_makes_it_whole_again_and_says_so_and_with_a_snapshot_it_can_be_recovered(
    log: BestEffortLog, breaks: Callable[[], Operations], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    log.begin(0, [(1, b"base", ())])
    disk = breaks()
    log.append(2, b"lost")
    disk.heal()
    log.begin(4, [(1, b"base", ())])
    log.append(5, b"kept")

    assert (log.whole, log.broken, kinds(log, 4)) == (True, True, [1, 5])
    log.retire(3)
    assert log.broken
    log.retire(4)
    assert not log.broken
    assert events(caplog)[1:] == ["log_writable_again"]


def test_a_begin_that_fails_ends_the_segment_before_it(
    log: BestEffortLog, told: Told, breaks: Callable[[], Operations]
) -> None:
    """What follows goes with a state that is nowhere."""
    log.begin(0, [(1, b"base", ())])
    disk = breaks()
    log.begin(2, [(1, b"base", ())])
    disk.heal()
    log.append(2, b"after the state of version 2")

    assert (kinds(log), told, log.broken) == ([1], ["ENOSPC"], True)


def test_after_clear_nothing_is_appended_until_begin(
    log: BestEffortLog, told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    log.begin(7, [(1, b"base", ())])
    log.clear()
    log.append(2, b"of a history that is over")
    assert (kinds(log), log.whole, log.broken) == ([], False, False)

    log.begin(3, [(1, b"base", ())])  # names may be smaller again
    log.append(4, b"kept")

    assert (kinds(log), told, caplog.records) == ([1, 4], [], [])


def test_a_folder_that_cannot_be_listed_is_told(tmp_path: Path, told: Told) -> None:
    log = BestEffortLog(tmp_path / "log", "no", told.append)
    (tmp_path / "log").touch()

    log.begin(0, [(1, b"base", ())])

    assert (told, log.broken) == (["ENOTDIR"], True)


def test_segments_of_one_version_are_all_kept_in_order(log: BestEffortLog) -> None:
    for kind in range(1, 4):
        log.begin(6, [(kind, b"base", ())])

    assert kinds(log) == [1, 2, 3]
    assert kinds(log, 6) == [3]
    assert kinds(log, 7) == []


def test_what_cannot_be_retired_is_no_failure(
    log: BestEffortLog,
    told: Told,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    log.begin(0, [(1, b"base", ())])
    log.begin(2, [(1, b"base", ())])
    with monkeypatch.context() as patch:
        patch.setattr(LogFiles, "rename", lambda *_: failing(errno.EIO)(None, None, ()))  # type: ignore[arg-type]
        log.retire(2)
    log.append(2, b"goes on")

    assert (kinds(log, 2), told, log.whole) == ([1, 2], [], True)
    assert [r.levelno for r in caplog.records] == [logging.WARNING]


def test_after_close_nothing_is_written(tmp_path: Path, log: BestEffortLog, told: Told) -> None:
    """A call that was late must not begin a segment that lacks what the others wrote meanwhile."""
    log.begin(0, [(1, b"base", ())])
    log.close()
    log.append(2, b"late")
    log.begin(1, [(1, b"late", ())])

    assert (kinds(log), told) == ([1], [])


def test_a_segment_without_a_record_is_damaged(
    tmp_path: Path, log: BestEffortLog, told: Told
) -> None:
    """Its first ones were on the disk before it got its name: what reads as no log at all was
    one.
    """
    log.begin(5, [(1, b"base", ())])
    log.close()
    path = tmp_path / "log" / "000000000005-0000.log"
    path.write_bytes(path.read_bytes()[:30])

    with pytest.raises(LogDamagedError, match="no complete record"):
        kinds(log, 5)


def test_a_log_that_cannot_be_read_is_told(tmp_path: Path, told: Told) -> None:
    (tmp_path / "log").write_text("no folder")

    with pytest.raises(SnapshotError, match=r"cannot read the log in .*: Not a directory"):
        BestEffortLog(tmp_path / "log", "no", told.append)


def test_a_log_of_another_user_is_told_and_kept(
    tmp_path: Path, log: BestEffortLog, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.begin(0, [(1, b"base", ())])
    log.close()

    def refused(path: Path, mode: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refused)
        with pytest.raises(SnapshotError, match="Permission denied; start the server as the owner"):
            BestEffortLog(tmp_path / "log", "no", told.append)
    assert kinds(BestEffortLog(tmp_path / "log", "no", told.append)) == [1]
