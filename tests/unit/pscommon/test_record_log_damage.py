"""Truncated files and flipped bytes yield the appended records, fewer with a notice, or an
error.
"""

import os
import tracemalloc
from pathlib import Path

import pytest

from pscommon.wal import format as record_format
from pscommon.wal.format import FILE_HEAD, HEAD_BYTES, Head, end_mark, pack_head, unpack_file_head
from pscommon.wal.log import LogDamagedError, WriteAheadLog
from tests.support.record_log_cases import FIRST, ROWS, append, begin, readable, row, rows_of

ALL = [FIRST, *ROWS]


def segment(folder: Path, recycled: bool) -> Path:
    """Return a small segment: in a new file, or in one with many old records after its end."""
    log = WriteAheadLog(folder, "no")
    if recycled:
        begin(log, "1", *[row(number) for number in range(9)])
        begin(log, "2")
        log.retire("2")
    begin(log, "3", FIRST)
    append(log, *ROWS)
    log.close()
    return folder / "3.log"


def ends() -> list[int]:
    """Return where the file's head and each record end."""
    result = [FILE_HEAD.size]
    for _, header, payload in ALL:
        result.append(result[-1] + HEAD_BYTES + len(header) + len(payload))
    return result


@pytest.mark.parametrize("recycled", [False, True])
def test_a_truncated_file_gives_the_records_before_the_cut(tmp_path: Path, recycled: bool) -> None:
    path = segment(tmp_path, recycled)
    raw, log = path.read_bytes(), WriteAheadLog(tmp_path, "no")
    for length in range(len(raw)):
        path.write_bytes(raw[:length])
        complete = sum(end <= length for end in ends()) - 1
        end = "damaged" if complete < 0 else "torn" if length < ends()[-1] + 8 else "whole"

        assert readable(log, "3") == (ALL[: max(complete, 0)], end), length
    assert len(raw) > ends()[-1] + 8 or not recycled


@pytest.mark.full
@pytest.mark.parametrize("recycled", [False, True])
def test_a_flipped_bit_never_yields_a_wrong_record(tmp_path: Path, recycled: bool) -> None:
    """It is an error before the last record; in the last record or the mark it looks like a torn
    append.
    """
    path = segment(tmp_path, recycled)
    raw, log = path.read_bytes(), WriteAheadLog(tmp_path, "no")
    for bit in range(8 * len(raw)):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        complete = sum(end <= bit // 8 for end in ends()) - 1
        end = (
            "damaged"
            if complete < len(ALL) - 1
            else "torn"
            if bit // 8 < ends()[-1] + 8
            else "whole"
        )

        assert readable(log, "3") == (ALL[: max(complete, 0)], end), bit


def test_the_error_follows_the_good_records_and_names_file_and_offset(
    tmp_path: Path,
) -> None:
    path = segment(tmp_path, recycled=False)
    raw = bytearray(path.read_bytes())
    raw[ends()[2] - 1] ^= 1
    path.write_bytes(raw)
    reader = WriteAheadLog(tmp_path, "no").read("3")

    assert next(reader).header == b"first"
    with pytest.raises(
        LogDamagedError, match=rf"3\.log is damaged at byte {ends()[1]}: .* byte {ends()[2]}$"
    ) as error:
        next(reader)
    assert (error.value.path, error.value.offset) == (path, ends()[1])


@pytest.mark.parametrize("content", [b"", b"\0" * 200, b"pslog\0\0\2" + b"\0" * 200])
def test_a_file_of_another_format_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "1.log").write_bytes(content)

    with pytest.raises(LogDamagedError, match=r"1\.log is damaged at byte 0: .* head"):
        rows_of(WriteAheadLog(tmp_path, "no"), "1")


def test_a_file_truncated_during_the_read_ends_there(tmp_path: Path) -> None:
    path = segment(tmp_path, recycled=False)
    reader = WriteAheadLog(tmp_path, "no").read("3")
    next(reader)
    os.truncate(path, ends()[3] - 1)

    assert [record.kind for record in reader] == [ROWS[0][0]]
    assert reader.torn


def test_a_missing_segment_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"1\.log"):
        rows_of(WriteAheadLog(tmp_path, "no"), "1")


@pytest.mark.parametrize(
    ("header", "payload"), [(0, 2**64 - 1), (2**32 - 1, 0), (0, 2**40), (0, 60), (60, 0)]
)
def test_a_length_beyond_the_file_allocates_no_memory(
    tmp_path: Path, header: int, payload: int
) -> None:
    """Even if the checksum of the head is correct."""
    path = segment(tmp_path, recycled=False)
    raw = path.read_bytes()
    nonce = unpack_file_head(raw[: FILE_HEAD.size])
    path.write_bytes(raw[: ends()[-1]] + pack_head(nonce, Head(1, header, payload, 0)) + b"x" * 50)
    tracemalloc.start()
    try:
        assert rows_of(WriteAheadLog(tmp_path, "no"), "3") == (ALL, True)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("gap", range(30, 80))
def test_a_valid_record_after_long_damage_is_found(
    tmp_path: Path, gap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the search splits the file, and however often the nonce occurs by chance."""
    monkeypatch.setattr(record_format, "SCAN_BYTES", 64)
    path = segment(tmp_path, recycled=False)
    raw = path.read_bytes()
    nonce = unpack_file_head(raw[: FILE_HEAD.size])
    good = pack_head(nonce, Head(7, 0, 0, 0))
    path.write_bytes(raw[: ends()[-1]] + b"?" * gap + nonce + b"?" * gap + good + end_mark(nonce))

    with pytest.raises(LogDamagedError, match=f"follows at byte {ends()[-1] + 2 * gap + 8}$"):
        rows_of(WriteAheadLog(tmp_path, "no"), "3")


def test_a_complete_head_with_a_torn_body_after_damage_is_no_record(tmp_path: Path) -> None:
    path = segment(tmp_path, recycled=False)
    raw = path.read_bytes()
    nonce = unpack_file_head(raw[: FILE_HEAD.size])
    path.write_bytes(
        raw[: ends()[-1]] + b"?" * 40 + pack_head(nonce, Head(7, 0, 10, 1234)) + b"0123456789"
    )

    assert rows_of(WriteAheadLog(tmp_path, "no"), "3") == (ALL, True)
