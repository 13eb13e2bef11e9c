"""Disks that fail at any operation: exactly the acknowledged records are read, and `begin`
recovers.
"""

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import pytest

from pscommon.wal import log as record_log
from pscommon.wal.log import Fsync, LogWriteError, WriteAheadLog
from tests.support.record_log_cases import (
    FIRST,
    ROWS,
    Failing,
    Row,
    Watched,
    append,
    begin,
    row,
    rows_of,
    stored,
)


@dataclass
class LogOwner:
    """A log in use, and which records must survive."""

    log: WriteAheadLog
    rows: dict[str, list[Row]] = field(default_factory=dict)  # acknowledged records by segment
    doubtful: dict[str, Row] = field(default_factory=dict)  # failed append by segment
    failed: list[LogWriteError] = field(default_factory=list)
    retained: str = ""  # segments before this one are not needed
    current: str = ""

    def begin(self, name: str, *rows: Row) -> None:
        with self._failing():
            begin(self.log, name, *rows)
            self.rows[name], self.current = list(rows), name

    def append(self, added: Row) -> None:
        broken = self.log.broken
        with self._failing():
            append(self.log, added)
            assert not broken
            self.rows[self.current].append(added)
            return
        assert self.log.broken
        self.doubtful.setdefault(self.current, added)

    def retire(self, before: str) -> None:
        self.retained = before
        with self._failing():
            self.log.retire(before)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Store the write error of the body and continue."""
        try:
            yield
        except LogWriteError as error:
            self.failed.append(error)

    def work(self) -> "LogOwner":
        """Continue after a failure with the next segment where the log is broken or has none."""
        for number in range(1, 6):
            self.begin(f"{number}0", row(number), row(100 + number))
            if not self.current:
                self.begin(f"{number}1", row(number))
            if not self.current:
                continue
            self.append(row(number + 1, 300))
            if self.log.broken:
                self.begin(f"{number}2")
            self.append(row(number + 2, 0))
            self.retire(f"{number - 1}5")
        return self

    def check(self, in_doubt: str = "") -> None:
        found = stored(self.log.folder)
        assert {name for name in self.rows if name > self.retained or name == self.current} <= set(
            found
        )
        assert set(found) <= {*self.rows, in_doubt}
        for name, (rows, torn) in found.items():
            doubtful = [self.doubtful[name]] if name in self.doubtful else []
            acknowledged = self.rows.get(name, rows)
            assert rows in (acknowledged, acknowledged + doubtful)
            assert not torn or doubtful


def continues(life: LogOwner) -> None:
    """In the same process, and in the next one."""
    life.begin("8", FIRST)
    for added in ROWS:
        life.append(added)
    life.check()
    assert life.rows["8"] == [FIRST, *ROWS]
    life.log.close()
    again = WriteAheadLog(life.log.folder, "no")
    begin(again, "9", FIRST)
    append(again, *ROWS)
    assert rows_of(again, "9") == rows_of(again, "8") == ([FIRST, *ROWS], False)


@pytest.mark.every(3)
@pytest.mark.parametrize("fsync", ["always", "no"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_any_operation_may_fail_once(tmp_path: Path, fsync: Fsync, code: int) -> None:
    for limit in range(1, 1000):
        disk = Failing(limit, code, part=limit % 50)
        life = LogOwner(log := WriteAheadLog(tmp_path / str(limit), fsync, disk)).work()
        life.check()
        assert {error.errno for error in life.failed} <= {code}
        assert all(str(tmp_path) in str(error.filename) for error in life.failed)
        reached, disk.limit = disk.failed, 0
        continues(life)
        if not reached:
            break
    assert limit > 40
    assert not life.failed
    assert len(log.segments()) == 3


@pytest.mark.parametrize("fsync", ["always", "no"])
def test_a_disk_may_fail_permanently_until_it_works_again(tmp_path: Path, fsync: Fsync) -> None:
    for limit in range(1, 40):
        disk = Failing(limit, errno.EROFS, for_good=True)
        life = LogOwner(log := WriteAheadLog(tmp_path / str(limit), fsync, disk)).work()
        # a begin may have failed after its rename without removing the segment
        begun = max(life.rows, default="")
        life.check(in_doubt=max([name for name in log.segments() if name > begun], default=""))
        assert life.failed
        disk.limit = 0
        continues(life)


def test_a_failed_begin_without_cleanup_is_invisible_once_the_disk_works(
    tmp_path: Path,
) -> None:
    log = WriteAheadLog(tmp_path, "no", files := Failing(0, errno.EIO, for_good=True))
    begin(log, "1", FIRST)
    files.limit = (
        len(files.seen) + 5
    )  # after open, write, write, sync and rename follows the folder
    with pytest.raises(LogWriteError):
        begin(log, "2", FIRST)
    files.limit = 0
    append(log, *ROWS)
    begin(log, "3", FIRST)

    assert stored(tmp_path) == {"1": ([FIRST, *ROWS], False), "3": ([FIRST], False)}


@pytest.mark.parametrize("operation", range(1, 6))
def test_a_failed_clear_is_finished_by_the_next_begin(tmp_path: Path, operation: int) -> None:
    log = WriteAheadLog(tmp_path, "no", files := Failing(0, errno.EIO, for_good=True))
    for name in ("5", "6", "7", "8"):
        begin(log, name, FIRST)
    # operations: two files become spares, two are removed, the folder is synced
    files.limit = len(files.seen) + operation
    with pytest.raises(LogWriteError):
        log.clear()
    assert log.segments() == ["5", "6", "7", "8"][: 5 - operation]
    with pytest.raises(LogWriteError):
        begin(log, "1", FIRST)
    files.limit = 0
    begin(log, "1", row(1))

    assert stored(tmp_path) == {"1": ([row(1)], False)}


@pytest.mark.parametrize("code", [0, errno.ENOSPC])
@pytest.mark.parametrize("recycled", [False, True])
def test_a_write_may_stop_at_any_byte(tmp_path: Path, recycled: bool, code: int) -> None:
    """A short write continues; a failed one is torn, also before old records of a reused file."""
    for part in range(1, 60):
        files = Failing(0, code, part)
        life = LogOwner(log := WriteAheadLog(tmp_path / str(part), "no", files))
        life.begin("1", *[row(number, 0) for number in range(9)])
        if recycled:
            life.begin("2")
            life.retire("2")
        life.begin("3", row(0, 0))
        files.limit = len(files.seen) + 1
        life.append(row(1, 0))
        torn = stored(log.folder)["3"][1]
        life.begin("4")
        life.append(row(5))
        life.check()

        assert bool(life.failed) == bool(code)
        assert torn == (code != 0 and part < 48)  # 48 bytes are a complete record


def test_a_write_of_no_bytes_is_an_error(tmp_path: Path) -> None:
    log = WriteAheadLog(tmp_path, "no", files := Failing(0, 0))
    begin(log, "1", FIRST)
    files.limit = len(files.seen) + 1

    with pytest.raises(LogWriteError, match="wrote nothing") as error:
        append(log, *ROWS)
    assert (error.value.errno, error.value.filename) == (errno.EIO, str(tmp_path / "1.log"))


def test_a_broken_log_makes_no_disk_operation_until_begin(
    tmp_path: Path,
) -> None:
    log = WriteAheadLog(tmp_path, "always", files := Failing(0, errno.ENOSPC, part=7))
    begin(log, "1", FIRST)
    files.limit = len(files.seen) + 1
    for _ in range(3):
        with pytest.raises(LogWriteError, match=r"No space left on device: .*1\.log") as error:
            append(log, row(1))
        assert error.value.errno == errno.ENOSPC
        assert log.broken == str(error.value)
    assert len(files.seen) == files.limit

    begin(log, "2", FIRST)
    append(log, *ROWS)
    assert log.broken == ""
    assert stored(tmp_path) == {"1": ([FIRST], True), "2": ([FIRST, *ROWS], False)}


def test_after_a_failed_sync_no_other_sync_is_trusted(tmp_path: Path) -> None:
    """The system reports an error once and drops the pages: a second fdatasync would succeed."""
    log = WriteAheadLog(tmp_path, "no", files := Failing(0, errno.EIO))
    begin(log, "1", FIRST)
    append(log, *ROWS)
    files.limit = len(files.seen) + 1
    for call in (log.sync, log.sync, lambda: append(log, FIRST)):
        with pytest.raises(LogWriteError, match=r"Input/output error: .*1\.log"):
            call()

    assert len(files.seen) == files.limit
    assert log.broken


def test_records_before_a_failed_append_are_synced(tmp_path: Path) -> None:
    log = WriteAheadLog(tmp_path, "everysec", files := Failing(0, errno.ENOSPC))
    begin(log, "1", FIRST)
    append(log, *ROWS)
    files.limit = len(files.seen) + 1
    with pytest.raises(LogWriteError):
        append(log, FIRST)
    log.close()

    assert files.seen[-1] == "sync"


@pytest.mark.parametrize("fsync", get_args(Fsync))
def test_appends_are_synced_by_mode(tmp_path: Path, fsync: Fsync) -> None:
    log = WriteAheadLog(tmp_path, fsync, files := Watched())
    begin(log, "1", FIRST)
    assert files.seen[-4:] == ["write", "sync", "rename", "sync_folder"]
    append(log, *ROWS)
    during = files.seen.count("sync") - 1
    log.close()

    if fsync == "everysec":  # the thread syncs once a second, perhaps now
        assert during + files.seen.count("sync") >= 2
    else:
        assert during == (len(ROWS) if fsync == "always" else 0)
        assert files.seen.count("sync") == during + 1


@pytest.mark.parametrize("fsync", ["always", "everysec"])
def test_a_segment_is_on_disk_before_the_next_one(tmp_path: Path, fsync: Fsync) -> None:
    log = WriteAheadLog(tmp_path, fsync, files := Watched())
    begin(log, "1", FIRST)
    append(log, *ROWS)
    begin(log, "2")

    assert (
        "sync"
        in files.seen[files.seen.index("sync_folder", 4) :][: -files.seen[::-1].index("open")]
    )
    log.close()


class SignallingDisk(Failing):
    """Lets a test wait for a sync."""

    def __init__(self) -> None:
        super().__init__(0, errno.EIO)
        self.synced = threading.Event()

    def sync(self, descriptor: int) -> None:
        self.synced.set()
        super().sync(descriptor)


def test_appended_records_are_synced_every_second_and_only_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_log, "SYNC_INTERVAL_SECONDS", 0.01)
    log = WriteAheadLog(tmp_path, "everysec", files := SignallingDisk())
    begin(log, "1", FIRST)
    for _ in range(3):
        files.synced.clear()
        append(log, FIRST)
        assert files.synced.wait(10)
    assert not files.synced.clear()
    assert not files.synced.wait(0.1)
    log.close()


def test_a_failed_background_sync_breaks_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_log, "SYNC_INTERVAL_SECONDS", 0.01)
    log = WriteAheadLog(tmp_path, "everysec", files := SignallingDisk())
    begin(log, "1", FIRST)
    files.limit = len(files.seen) + 2
    files.synced.clear()
    append(log, FIRST)
    assert files.synced.wait(10)
    with pytest.raises(LogWriteError):  # waits for the sync of the thread
        log.sync()

    assert "Input/output error" in log.broken
    with pytest.raises(LogWriteError):
        append(log, FIRST)
    begin(log, "2", FIRST)
    assert log.broken == ""
    log.close()


class SlowDisk(Watched):
    """Its first sync after `hold` waits for `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.hold, self.go = threading.Event(), threading.Event()

    def sync(self, descriptor: int) -> None:
        super().sync(descriptor)
        if self.hold.is_set():
            assert self.go.wait(10)


def test_threads_that_wait_for_a_sync_share_the_next_one(tmp_path: Path) -> None:
    log = WriteAheadLog(tmp_path, "always", files := SlowDisk())
    begin(log, "1")
    files.hold.set()
    before, start = files.seen.count("sync"), log.nbytes
    threads = [threading.Thread(target=append, args=[log, row(9)]) for _ in range(5)]
    for thread in threads:
        thread.start()
    size, turn = 32 + len(row(9)[1]) + len(row(9)[2]), threading.Event()
    while log.nbytes < start + 5 * size:  # appends do not wait for the running sync
        turn.wait(0.001)
    files.go.set()
    for thread in threads:
        thread.join()

    assert files.seen.count("sync") - before == 2
