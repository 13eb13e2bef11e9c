"""`ps-ctl snapshot` offline: list, verify and export a data directory."""

import json
from pathlib import Path

import pytest
import safetensors.torch

from pscommon.snapshot import SnapshotDirectory
from psworker.ctl.cli import main
from tests.support.snapshot_cases import TINY, manifest_of, random_buffer, save_tiny, write_part

Output = pytest.CaptureFixture[str]


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    for version in (1, 2):
        save_tiny(SnapshotDirectory(tmp_path / "data"), version, shards=2)
    return tmp_path / "data"


def damage(data_dir: Path, version: int) -> Path:
    part = next(SnapshotDirectory(data_dir).path(version).glob("shard-1-*"))
    raw = bytearray(part.read_bytes())
    raw[100] ^= 4
    part.write_bytes(raw)
    return part


def exported(file: Path) -> bytes:
    return bytes(safetensors.torch.load_file(file)["w"].numpy().tobytes())


def expected(version: int) -> bytes:
    return random_buffer(TINY, version)[: TINY.tensors[0].nbytes].tobytes()


def test_list_shows_damaged_and_complete_snapshots(data_dir: Path, capsys: Output) -> None:
    (SnapshotDirectory(data_dir).path(1) / "MANIFEST.json").write_text("{}")
    assert main(["snapshot", "list", str(data_dir), "--output", "json"]) == 0
    damaged, complete = json.loads(capsys.readouterr().out)

    assert (damaged["version"], damaged["state"]) == (1, "damaged")
    assert (complete["version"], complete["state"], complete["job"], complete["shards"]) == (
        2,
        "complete",
        "job-1",
        2,
    )
    assert complete["nbytes"] > 2400
    assert main(["snapshot", "list", str(data_dir)]) == 0
    assert "complete" in capsys.readouterr().out


def test_verify_accepts_valid_snapshots(data_dir: Path, capsys: Output) -> None:
    assert main(["snapshot", "verify", str(data_dir)]) == 0
    assert capsys.readouterr().out.count(" sound ") == 2


def test_verify_reports_the_damaged_file_with_exit_code_12(data_dir: Path, capsys: Output) -> None:
    part = damage(data_dir, 2)

    assert main(["snapshot", "verify", str(data_dir)]) == 12
    assert f"{part}: damaged" in capsys.readouterr().out
    assert main(["snapshot", "verify", str(data_dir), "--output", "json"]) == 12
    assert [row["state"] for row in json.loads(capsys.readouterr().out)] == ["sound", "damaged"]
    assert main(["snapshot", "verify", str(data_dir), "--version", "1"]) == 0


def test_verify_reports_a_missing_version(data_dir: Path, capsys: Output) -> None:
    assert main(["snapshot", "verify", str(data_dir), "--version", "9"]) == 12
    assert "MANIFEST.json is missing" in capsys.readouterr().out


def test_parts_on_other_disks_are_reported(tmp_path: Path, capsys: Output) -> None:
    disks = [SnapshotDirectory(tmp_path / "0"), SnapshotDirectory(tmp_path / "1")]
    parts = tuple(
        write_part(disk, 5, TINY, shard, 2, {"weight": random_buffer(TINY, 5)})
        for shard, disk in enumerate(disks)
    )
    disks[0].commit(manifest_of(5, TINY, parts))

    assert main(["snapshot", "verify", str(tmp_path / "0")]) == 0
    assert "1 of 2 parts elsewhere" in capsys.readouterr().out
    assert main(["snapshot", "export", str(tmp_path / "0"), str(tmp_path / "x")]) == 12
    assert f"{parts[1].file} is missing in {disks[0].path(5)}" in capsys.readouterr().err


def test_export_writes_the_newest_snapshot(data_dir: Path, tmp_path: Path, capsys: Output) -> None:
    assert (
        main(
            [
                "snapshot",
                "export",
                str(data_dir),
                str(tmp_path / "m.safetensors"),
                "--output",
                "json",
            ]
        )
        == 0
    )
    document = json.loads(capsys.readouterr().out)

    assert exported(tmp_path / "m.safetensors") == expected(2)
    assert document == {
        "version": 2,
        "file": str(tmp_path / "m.safetensors"),
        "nbytes": (tmp_path / "m.safetensors").stat().st_size,
    }


def test_export_skips_a_damaged_snapshot_and_reports_it(
    data_dir: Path, tmp_path: Path, capsys: Output
) -> None:
    part = damage(data_dir, 2)

    assert main(["snapshot", "export", str(data_dir), str(tmp_path / "m.safetensors")]) == 0
    assert f"skipped a damaged snapshot: {part}" in capsys.readouterr().err
    assert exported(tmp_path / "m.safetensors") == expected(1)


def test_export_of_a_damaged_version_writes_no_other_version(
    data_dir: Path, tmp_path: Path, capsys: Output
) -> None:
    target = tmp_path / "m.safetensors"
    assert main(["snapshot", "export", str(data_dir), str(target), "--version", "1"]) == 0
    assert exported(target) == expected(1)
    damage(data_dir, 2)
    assert main(["snapshot", "export", str(data_dir), str(target), "--version", "2"]) == 12
    assert "damaged" in capsys.readouterr().err
    assert exported(target) == expected(1)


def test_export_without_a_valid_snapshot_exits_with_12(
    data_dir: Path, tmp_path: Path, capsys: Output
) -> None:
    damage(data_dir, 1)
    damage(data_dir, 2)

    assert main(["snapshot", "export", str(data_dir), str(tmp_path / "m.safetensors")]) == 12
    assert "no snapshot in" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["list", "verify"])
def test_a_folder_without_snapshots_is_reported_with_its_path(
    tmp_path: Path, capsys: Output, command: str
) -> None:
    assert main(["snapshot", command, str(tmp_path)]) == 12
    assert f"there are no snapshots in {tmp_path}" in capsys.readouterr().err


def test_a_path_that_list_prints_is_accepted_in_place_of_the_data_directory(
    data_dir: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(data_dir.parent)
    assert main(["snapshot", "list", data_dir.name, "--output", "json"]) == 0
    paths = [row["path"] for row in json.loads(capsys.readouterr().out)]
    monkeypatch.chdir("/")
    target = tmp_path / "m.safetensors"

    for version, path in enumerate(paths, start=1):
        assert main(["snapshot", "verify", path, "--output", "json"]) == 0
        assert [row["version"] for row in json.loads(capsys.readouterr().out)] == [version]
        assert main(["snapshot", "list", path, "--output", "json"]) == 0
        assert [row["version"] for row in json.loads(capsys.readouterr().out)] == [version]
        assert main(["snapshot", "export", path, str(target)]) == 0
        assert capsys.readouterr().out.startswith(f"version  {version}")
        assert exported(target) == expected(version)


def test_the_path_of_a_snapshot_excludes_another_version(
    data_dir: Path, tmp_path: Path, capsys: Output
) -> None:
    path = data_dir / "snapshots" / "000000000001"

    assert main(["snapshot", "verify", str(path), "--version", "2"]) == 2
    assert "DIR is the snapshot of version 1" in capsys.readouterr().err


def test_the_folder_of_an_incomplete_snapshot_is_refused(data_dir: Path, capsys: Output) -> None:
    (data_dir / "snapshots" / "000000000007").mkdir()

    assert main(["snapshot", "verify", str(data_dir / "snapshots" / "000000000007")]) == 12
    assert "a path printed by `snapshot list`" in capsys.readouterr().err


def test_a_missing_folder_is_a_usage_error(tmp_path: Path, capsys: Output) -> None:
    assert main(["snapshot", "verify", str(tmp_path / "nowhere")]) == 2
    assert "does not exist" in capsys.readouterr().err
