"""A log returns the appended records: segments, spare files, and concurrent calls."""

import shutil
import stat
import threading
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from pscommon.wal.log import Fsync, WriteAheadLog
from tests.support.record_log_cases import FIRST, ROWS, Row, append, begin, row, rows_of, stored


def test_the_next_process_reads_appended_records_in_order(tmp_path: Path) -> None:
    log = WriteAheadLog(tmp_path / "log", "no")
    begin(log, "0001", FIRST)
    append(log, *ROWS)

    assert stored(tmp_path / "log") == {"0001": ([FIRST, *ROWS], False)}
    log.close()
    assert stored(tmp_path / "log") == {"0001": ([FIRST, *ROWS], False)}


def test_an_empty_log_has_no_segments_and_refuses_records(tmp_path: Path) -> None:
    log = WriteAheadLog(tmp_path / "log", "no")

    assert (log.segments(), log.nbytes, log.broken) == ([], 0, "")
    with pytest.raises(ValueError, match="begin one"):
        append(log, FIRST)
    log.sync()
    log.retire("9")
    log.clear()
    log.close()
    assert not (tmp_path / "log").exists()


def test_a_payload_may_have_any_type_and_many_pieces(tmp_path: Path) -> None:
    log = WriteAheadLog(tmp_path, "no")
    begin(log, "1")
    numbers = np.arange(12, dtype="<f4").reshape(3, 4)
    log.append(
        1,
        b"numbers",
        [numbers.data, np.zeros((0, 4)).data, np.array(7, "<i2").data, bytearray(b"end")],
    )
    log.append(2, b"pieces", [bytes([number % 256]) for number in range(3000)])

    assert rows_of(log, "1")[0] == [
        (1, b"numbers", numbers.tobytes() + b"\7\0end"),
        (2, b"pieces", bytes(number % 256 for number in range(3000))),
    ]


def test_a_payload_is_read_only_and_its_memory_is_reused(tmp_path: Path) -> None:
    log = WriteAheadLog(tmp_path, "no")
    begin(log, "1", row(1), row(2))
    reader = log.read("1")
    first = next(reader).payload

    assert first.readonly
    assert np.frombuffer(first, "<f4").flags.aligned
    assert first == row(1)[2]
    next(reader)
    assert first == row(2)[2]


def test_nbytes_is_the_size_of_the_file_without_its_end_mark(tmp_path: Path) -> None:
    log = WriteAheadLog(tmp_path, "no")
    begin(log, "1")
    empty = log.nbytes
    append(log, FIRST)

    assert log.nbytes - empty == 32 + len(FIRST[1])
    assert (tmp_path / "1.log").stat().st_size == log.nbytes + 8


def test_only_the_owner_can_read_folder_and_files(tmp_path: Path) -> None:
    log = WriteAheadLog(tmp_path / "log", "no")
    begin(log, "1", FIRST)

    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "log" / "1.log").stat().st_mode) == 0o600


def test_each_segment_keeps_its_own_records(tmp_path: Path) -> None:
    log = WriteAheadLog(tmp_path, "no")
    for number in (1, 2, 3):
        begin(log, f"{number}", row(number))
        append(log, row(10 + number))

    assert log.segments() == ["1", "2", "3"]
    assert stored(tmp_path) == {f"{n}": ([row(n), row(10 + n)], False) for n in (1, 2, 3)}


@pytest.mark.parametrize("name", ["2", "1", "", ".", "a/b", "../3", "3 ", "3.log", "é"])
def test_a_segment_name_not_after_the_last_one_is_refused(tmp_path: Path, name: str) -> None:
    log = WriteAheadLog(tmp_path, "no")
    begin(log, "2", FIRST)

    with pytest.raises(ValueError, match="is no name for the segment after '2'"):
        begin(log, name)
    append(log, *ROWS)
    assert stored(tmp_path) == {"2": ([FIRST, *ROWS], False)}
    with pytest.raises(ValueError, match="is no name"):
        begin(WriteAheadLog(tmp_path, "no"), name)


def test_a_removed_folder_is_created_again(tmp_path: Path) -> None:
    log = WriteAheadLog(tmp_path / "log", "no")
    log.begin("1", [(1, b"a", ())])
    shutil.rmtree(tmp_path / "log")
    log.begin("2", [(1, b"b", ())])

    assert [record.header for record in WriteAheadLog(tmp_path / "log", "no").read("2")] == [b"b"]


def test_unencodable_records_leave_the_previous_segment(tmp_path: Path) -> None:
    log = WriteAheadLog(tmp_path, "no")
    begin(log, "1", FIRST)

    with pytest.raises(ZeroDivisionError):
        log.begin("2", ((1 // (2 - number), b"", []) for number in range(3)))
    append(log, *ROWS)

    assert [path.name for path in tmp_path.iterdir()] == ["1.log"]
    assert stored(tmp_path) == {"1": ([FIRST, *ROWS], False)}


@pytest.mark.parametrize("length", range(0, 25, 4))
def test_a_retired_file_is_reused_and_its_old_records_never_appear(
    tmp_path: Path, length: int
) -> None:
    """Shorter and longer contents with the same records: only the nonce differs."""
    log = WriteAheadLog(tmp_path, "no")
    begin(log, "1", *[row(number) for number in range(20)])
    before = (tmp_path / "1.log").stat()
    begin(log, "2")
    log.retire("2")
    begin(log, "3")
    append(log, *[row(number) for number in range(length)])

    assert rows_of(log, "3") == ([row(number) for number in range(length)], False)
    assert (tmp_path / "3.log").stat().st_ino == before.st_ino
    assert (tmp_path / "3.log").stat().st_size >= before.st_size


def test_two_spare_files_are_retained_and_used_before_new_ones(tmp_path: Path) -> None:
    log = WriteAheadLog(tmp_path, "no")
    for number in range(6):
        begin(log, f"{number}", FIRST)
    log.retire("5")

    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.spare", "1.spare", "5.log"]
    begin(log, "6")
    begin(log, "7")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["5.log", "6.log", "7.log"]


def test_the_current_segment_is_never_retired(tmp_path: Path) -> None:
    log = WriteAheadLog(tmp_path, "no")
    begin(log, "1", FIRST)
    begin(log, "2", FIRST)
    log.retire("9")
    append(log, *ROWS)

    assert stored(tmp_path) == {"2": ([FIRST, *ROWS], False)}


def test_after_clear_the_log_is_empty_and_names_start_again(tmp_path: Path) -> None:
    log = WriteAheadLog(tmp_path, "no")
    begin(log, "5", FIRST)
    begin(log, "6", FIRST)
    log.clear()

    assert stored(tmp_path) == {}
    with pytest.raises(ValueError, match="begin one"):
        append(log, FIRST)
    begin(log, "1", row(7))
    assert stored(tmp_path) == {"1": ([row(7)], False)}


@pytest.mark.parametrize("fsync", get_args(Fsync))
def test_a_closed_log_refuses_records_and_has_no_thread(tmp_path: Path, fsync: Fsync) -> None:
    before = set(threading.enumerate())
    log = WriteAheadLog(tmp_path, fsync)
    begin(log, "1", FIRST)
    append(log, *ROWS)
    log.close()
    log.close()

    assert set(threading.enumerate()) <= before
    with pytest.raises(ValueError, match="begin one"):
        append(log, FIRST)
    assert stored(tmp_path) == {"1": ([FIRST, *ROWS], False)}


@pytest.mark.parametrize("fsync", ["always", "no"])
def test_concurrent_records_are_complete_and_in_order_per_thread(
    tmp_path: Path, fsync: Fsync
) -> None:
    """While one more thread changes from segment to segment."""
    log = WriteAheadLog(tmp_path, fsync)
    begin(log, "00")
    start = threading.Barrier(3)

    def add(first: int) -> None:
        start.wait()
        for number in range(first, first + 150):
            append(log, row(number, number))

    threads = [threading.Thread(target=add, args=[first]) for first in (1000, 2000)]
    for thread in threads:
        thread.start()
    start.wait()
    for number in range(1, 20):
        begin(log, f"{number:02}")
    for thread in threads:
        thread.join()

    found: list[Row] = [
        record for rows, torn in stored(tmp_path).values() for record in rows if not torn
    ]
    for first in (1000, 2000):
        mine = [record for record in found if first <= record[0] < first + 1000]
        assert mine == [row(number, number) for number in range(first, first + 150)]
