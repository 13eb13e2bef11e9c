"""Which snapshots are removed: never the newest valid one."""

from pathlib import Path

import pytest

from pscommon.snapshot import SnapshotDirectory
from tests.support.snapshot_cases import TINY, random_buffer, save_tiny, write_part


def with_versions(tmp_path: Path, *versions: int) -> SnapshotDirectory:
    for version in versions:
        save_tiny(SnapshotDirectory(tmp_path), version)
    return SnapshotDirectory(tmp_path)


def damage(snapshots: SnapshotDirectory, version: int) -> None:
    part = next(snapshots.path(version).glob("*.safetensors"))
    raw = bytearray(part.read_bytes())
    raw[-1] ^= 1
    part.write_bytes(raw)


def unfinished(snapshots: SnapshotDirectory, version: int) -> None:
    write_part(snapshots, version, TINY, 0, 2, {"weight": random_buffer(TINY, version)})


@pytest.mark.parametrize(
    ("keep", "left"), [(1, [5]), (2, [4, 5]), (5, [1, 2, 3, 4, 5]), (9, [1, 2, 3, 4, 5])]
)
def test_the_newest_snapshots_stay(tmp_path: Path, keep: int, left: list[int]) -> None:
    snapshots = with_versions(tmp_path, 1, 2, 3, 4, 5)
    removed = snapshots.prune(keep)

    assert snapshots.versions() == left
    assert sorted(removed + left) == [1, 2, 3, 4, 5]
    assert len(list((tmp_path / "snapshots").iterdir())) == len(left)


@pytest.mark.parametrize("keep", [0, -1])
def test_at_least_one_snapshot_stays(tmp_path: Path, keep: int) -> None:
    snapshots = with_versions(tmp_path, 1, 2)
    snapshots.prune(keep)

    assert snapshots.versions() == [2]


def test_damaged_snapshots_do_not_count(tmp_path: Path) -> None:
    snapshots = with_versions(tmp_path, 1, 2, 3, 4)
    damage(snapshots, 4)
    damage(snapshots, 3)

    assert snapshots.prune(1) == [1]
    assert snapshots.newest_valid().manifest == snapshots.manifest(2)


def test_damage_between_two_prunes_is_detected(tmp_path: Path) -> None:
    snapshots = with_versions(tmp_path, 1, 2, 3)
    snapshots.prune(2)
    damage(snapshots, 3)

    assert snapshots.prune(1) == []
    assert snapshots.newest_valid().manifest == snapshots.manifest(2)


def test_a_damaged_snapshot_older_than_a_retained_one_is_removed(tmp_path: Path) -> None:
    snapshots = with_versions(tmp_path, 1, 2, 3)
    damage(snapshots, 2)

    assert snapshots.prune(2) == [2]
    assert snapshots.versions() == [1, 3]


def test_without_a_valid_snapshot_nothing_is_removed(tmp_path: Path) -> None:
    snapshots = with_versions(tmp_path, 1, 2)
    damage(snapshots, 1)
    damage(snapshots, 2)

    assert snapshots.prune(1) == []


def test_incomplete_snapshots_are_removed_once_a_newer_one_is_complete(tmp_path: Path) -> None:
    snapshots = with_versions(tmp_path, 2)
    unfinished(snapshots, 1)
    unfinished(snapshots, 3)

    assert snapshots.versions() == [2]
    assert snapshots.newest_valid().skipped == ()
    assert snapshots.prune(3) == [1]
    assert snapshots.path(3).is_dir()


def test_a_disk_with_parts_only_retains_the_given_versions(tmp_path: Path) -> None:
    snapshots = SnapshotDirectory(tmp_path)
    for version in (1, 2, 3, 4):
        unfinished(snapshots, version)

    assert snapshots.prune(1) == []
    assert snapshots.retain([3, 1]) == [2]
    assert snapshots.retain([]) == []
    assert sorted(path.name for path in snapshots.folder.iterdir()) == [
        f"{v:012d}" for v in (1, 3, 4)
    ]


def test_snapshots_of_another_job_are_not_removed(tmp_path: Path) -> None:
    snapshots = with_versions(tmp_path, 1, 2, 4)
    unfinished(snapshots, 3)

    assert snapshots.retain([9], "job-2") == [3]
    assert snapshots.versions() == [1, 2, 4]
    assert snapshots.retain([9], "job-1") == [1, 2, 4]


def test_foreign_files_are_unchanged(tmp_path: Path) -> None:
    snapshots = with_versions(tmp_path, 1, 2)
    for name in ("notes", "1", "0000000000001", "000000000001.bak"):
        (snapshots.folder / name).mkdir()
    snapshots.prune(1)

    assert snapshots.versions() == [2]
    assert sorted(path.name for path in snapshots.folder.iterdir()) == [
        "0000000000001",
        "000000000001.bak",
        "000000000002",
        "1",
        "notes",
    ]


def test_a_resume_from_an_older_version_moves_newer_ones_aside(tmp_path: Path) -> None:
    snapshots = with_versions(tmp_path, 1, 2, 3)
    aside = snapshots.set_aside(1)
    save_tiny(snapshots, 2)

    assert [path.name for path in aside] == ["000000000002.aside-1", "000000000003.aside-1"]
    assert all((path / "MANIFEST.json").is_file() for path in aside)
    assert snapshots.versions() == [1, 2]
    assert snapshots.set_aside(1)[0].name == "000000000002.aside-2"
    assert snapshots.set_aside(-1)[0].name == "000000000001.aside-1"
    assert snapshots.newest_valid() == (None, ())


def test_an_empty_or_missing_data_directory_has_no_snapshots(tmp_path: Path) -> None:
    snapshots = SnapshotDirectory(tmp_path / "not made yet")

    assert (
        snapshots.versions(),
        snapshots.newest_valid(),
        snapshots.prune(1),
        snapshots.sweep(0),
    ) == (
        [],
        (None, ()),
        [],
        [],
    )
