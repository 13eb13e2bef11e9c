"""Any changed byte and any truncation of a snapshot's files is detected; the previous one
is used.
"""

import errno
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from pscommon.core.errors import SnapshotError
from pscommon.snapshot import SnapshotDirectory
from tests.support.snapshot_cases import MIXED, random_buffer, save, save_tiny


@pytest.fixture
def snapshots(tmp_path: Path) -> SnapshotDirectory:
    snapshots = SnapshotDirectory(tmp_path)
    save_tiny(snapshots, 1)
    save_tiny(snapshots, 2, shards=2)
    return snapshots


def files_of(snapshots: SnapshotDirectory, version: int) -> list[Path]:
    return sorted(snapshots.path(version).iterdir())


def is_found(tmp_path: Path, file: Path) -> None:
    problems = SnapshotDirectory(tmp_path).verify(2)

    assert [str(file) in problem for problem in problems] == [True]


def is_skipped(tmp_path: Path, file: Path) -> None:
    found = SnapshotDirectory(tmp_path).newest_valid()

    assert found.manifest is not None
    assert found.manifest.version == 1
    assert [str(file) in reason for reason in found.skipped] == [True]


def flips(raw: bytes) -> Iterator[bytes]:
    for place in range(len(raw)):
        changed = bytearray(raw)
        changed[place] ^= 1 << place % 8
        yield bytes(changed)


def forgivable(raw: bytes) -> Iterator[bytes]:
    """Return changes that JSON ignores: letter case and white space."""
    for place, byte in enumerate(raw):
        for other in (byte ^ 0x20, 0x20, 0x09):
            if byte != other:
                yield raw[:place] + bytes([other]) + raw[place + 1 :]


def damages(file: Path, changes: Iterable[bytes]) -> Iterator[int]:
    raw = file.read_bytes()
    for number, changed in enumerate(changes):
        file.write_bytes(changed)
        yield number
    file.write_bytes(raw)


@pytest.mark.every(3)
@pytest.mark.parametrize("which", range(3))
def test_every_flipped_byte_is_detected(
    tmp_path: Path, snapshots: SnapshotDirectory, which: int
) -> None:
    file = files_of(snapshots, 2)[which]
    for number in damages(file, flips(file.read_bytes())):
        is_found(tmp_path, file)
        if number % 8 == 0:
            is_skipped(tmp_path, file)

    assert SnapshotDirectory(tmp_path).verify(2) == []


def test_a_manifest_change_that_json_ignores_is_detected(
    tmp_path: Path, snapshots: SnapshotDirectory
) -> None:
    file = files_of(snapshots, 2)[0]
    for _ in damages(file, forgivable(file.read_bytes())):
        with pytest.raises(SnapshotError, match=r"MANIFEST.json: (damaged|'ascii')"):
            snapshots.manifest(2)


@pytest.mark.every(3)
@pytest.mark.parametrize("which", range(3))
def test_every_truncation_is_detected(
    tmp_path: Path, snapshots: SnapshotDirectory, which: int
) -> None:
    file = files_of(snapshots, 2)[which]
    raw = file.read_bytes()
    for length in damages(file, (raw[:length] for length in range(len(raw)))):
        is_found(tmp_path, file)
        if length % 8 == 0:
            is_skipped(tmp_path, file)


@pytest.mark.parametrize("which", range(3))
def test_an_appended_byte_is_detected(
    tmp_path: Path, snapshots: SnapshotDirectory, which: int
) -> None:
    file = files_of(snapshots, 2)[which]
    file.write_bytes(file.read_bytes() + b"\n")

    is_found(tmp_path, file)
    is_skipped(tmp_path, file)


def test_the_snapshot_of_these_tests_has_about_4_kilobytes(snapshots: SnapshotDirectory) -> None:
    files = files_of(snapshots, 2)

    assert len(files) == 3
    assert 3500 < sum(file.stat().st_size for file in files) < 4500


def test_a_missing_part_is_detected(tmp_path: Path, snapshots: SnapshotDirectory) -> None:
    missing = files_of(snapshots, 2)[2]
    missing.unlink()

    assert SnapshotDirectory(tmp_path).verify(2) == [
        f"{missing.name} is missing in {missing.parent}"
    ]


def test_every_damaged_part_is_reported(tmp_path: Path, snapshots: SnapshotDirectory) -> None:
    for part in files_of(snapshots, 2)[1:]:
        part.write_bytes(b"")

    assert len(SnapshotDirectory(tmp_path).verify(2)) == 2


def test_later_damage_is_detected_by_the_same_object(
    snapshots: SnapshotDirectory,
) -> None:
    part = files_of(snapshots, 2)[1]
    part.write_bytes(bytes(part.stat().st_size))

    assert len(snapshots.verify(2)) == 1
    assert snapshots.newest_valid().manifest == snapshots.manifest(1)


def test_a_valid_snapshot_of_another_version_is_not_used(
    tmp_path: Path, snapshots: SnapshotDirectory
) -> None:
    snapshots.path(2).rename(snapshots.path(3))

    assert "is of version 2" in SnapshotDirectory(tmp_path).verify(3)[0]


def test_without_a_valid_snapshot_every_reason_is_reported(
    tmp_path: Path, snapshots: SnapshotDirectory
) -> None:
    for version in (1, 2):
        files_of(snapshots, version)[0].write_bytes(b"{}")
    found = SnapshotDirectory(tmp_path).newest_valid()

    assert found.manifest is None
    assert ["000000000002" in found.skipped[0], "000000000001" in found.skipped[1]] == [True, True]


def test_an_unreadable_snapshot_is_an_error_with_its_path(snapshots: SnapshotDirectory) -> None:
    with pytest.raises(SnapshotError, match=r"MANIFEST.json is missing in .*000000000009"):
        snapshots.manifest(9)


def test_a_large_snapshot_is_valid(tmp_path: Path) -> None:
    snapshots = SnapshotDirectory(tmp_path)
    save(
        snapshots,
        5,
        MIXED,
        3,
        {"weight": random_buffer(MIXED, 1), "exp_avg": random_buffer(MIXED, 2)},
    )

    assert SnapshotDirectory(tmp_path).verify(5) == []


def test_unreadable_folders_are_reported(
    snapshots: SnapshotDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of another user, for example."""

    def refused(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refused)
    with pytest.raises(SnapshotError, match=r"cannot read .*: Permission denied") as caught:
        snapshots.newest_valid()
    assert caught.value.exit_code == 12
