"""M shards read back byte for byte what N shards wrote, from whichever files hold it."""

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from pscommon.core.errors import SnapshotError
from pscommon.core.model_spec import ROLES
from pscommon.core.partition import ByteRange, PartitionPlan
from pscommon.snapshot import Manifest, SnapshotDirectory, SnapshotReader
from tests.support.snapshot_cases import (
    GROUPS,
    MIXED,
    TINY,
    manifest_of,
    random_buffer,
    ranges,
    save,
    shard_tensors,
    write_part,
    write_parts,
)

WEIGHT, MOMENT = random_buffer(MIXED, 1), random_buffer(MIXED, 2)
VERSION = 1200


def read(reader: SnapshotReader, kind: str, span: ByteRange) -> tuple[bool, bytes]:
    out = bytearray(b"\xee" * span.nbytes)
    return reader.read(kind, span.start, span.stop, memoryview(out)), bytes(out)


def written(tmp_path: Path, shards: int) -> tuple[SnapshotDirectory, Manifest]:
    snapshots = SnapshotDirectory(tmp_path)
    save(snapshots, VERSION, MIXED, shards, {"weight": WEIGHT, "exp_avg": MOMENT})
    return snapshots, snapshots.manifest(VERSION)


@pytest.mark.parametrize("new", [1, 2, 3, 5])
@pytest.mark.parametrize("old", [1, 2, 3, 5])
def test_any_number_of_shards_restores_into_any_other(tmp_path: Path, old: int, new: int) -> None:
    snapshots, manifest = written(tmp_path, old)
    plan = PartitionPlan(MIXED, new)
    for shard in range(new):
        reader = SnapshotReader(snapshots, manifest, needed=ranges(plan, shard))
        for role in ROLES:
            span = plan.range(shard, role)

            assert read(reader, "weight", span) == (True, WEIGHT[span.start : span.stop].tobytes())
        span = plan.range(shard, "trainable")
        assert read(reader, "exp_avg", span) == (True, MOMENT[span.start : span.stop].tobytes())


@pytest.mark.parametrize("old", [1, 2, 3, 5, 100])
def test_any_range_can_be_read(tmp_path: Path, old: int) -> None:
    reader = SnapshotReader(*written(tmp_path, old))
    cuts = sorted(np.random.default_rng(0).integers(0, len(WEIGHT) + 1, 60).tolist())
    for start, stop in itertools.pairwise(cuts):
        assert read(reader, "weight", ByteRange(start, stop)) == (
            True,
            WEIGHT[start:stop].tobytes(),
        )


def test_folders_are_named_by_version_with_12_digits(tmp_path: Path) -> None:
    written(tmp_path, 1)

    assert [path.name for path in (tmp_path / "snapshots").iterdir()] == ["000000001200"]
    assert SnapshotDirectory(tmp_path).versions() == [VERSION]


def test_steps_groups_kinds_model_and_shards_are_restored(tmp_path: Path) -> None:
    reader = SnapshotReader(*written(tmp_path, 3))

    assert reader.kinds() == {"weight", "exp_avg"}
    # "empty" has no bytes, so it is on no shard
    assert reader.steps() == {
        index: VERSION - index for index in range(len(MIXED.tensors)) if index != 6
    }
    assert reader.groups_json() == GROUPS
    assert (reader.model, reader.shards) == (MIXED, 3)


def test_a_missing_state_reads_as_false(tmp_path: Path) -> None:
    reader = SnapshotReader(*written(tmp_path, 2))
    found, out = read(reader, "momentum_buffer", ByteRange(0, 128))

    assert (found, out) == (False, bytes(128))


def test_a_partial_state_reads_as_false_with_zeros_for_the_rest(
    tmp_path: Path,
) -> None:
    snapshots = SnapshotDirectory(tmp_path)
    kinds = {"weight": WEIGHT, "exp_avg": MOMENT}
    parts = (
        write_part(snapshots, 1, MIXED, 0, 2, kinds),
        write_part(snapshots, 1, MIXED, 1, 2, {"weight": WEIGHT}),
    )
    snapshots.commit(manifest_of(1, MIXED, parts))
    reader = SnapshotReader(snapshots, snapshots.manifest(1))
    half, complete = (
        PartitionPlan(MIXED, 2).range(0, "trainable"),
        PartitionPlan(MIXED, 1).range(0, "trainable"),
    )

    assert read(reader, "exp_avg", half) == (True, MOMENT[: half.stop].tobytes())
    assert read(reader, "exp_avg", complete) == (
        False,
        MOMENT[: half.stop].tobytes() + bytes(complete.stop - half.stop),
    )


def test_incomplete_weights_are_an_error_with_file_and_tensor(tmp_path: Path) -> None:
    snapshots, plan = SnapshotDirectory(tmp_path), PartitionPlan(MIXED, 2)
    tensors = [shard_tensors(plan, shard, {"weight": WEIGHT}) for shard in range(2)]
    missing = max(tensors[1], key=lambda key: int(key.partition("@")[2]))
    del tensors[1][missing]
    parts = tuple(snapshots.write_part(1, shard, 2, tensors[shard], {}, "[]") for shard in range(2))
    snapshots.commit(manifest_of(1, MIXED, parts))
    reader = SnapshotReader(snapshots, snapshots.manifest(1))

    with pytest.raises(
        SnapshotError, match=rf"000000000001: {parts[1].file} does not hold all weights of mask"
    ):
        read(reader, "weight", ByteRange(0, plan.nbytes))


def test_a_buffer_of_another_length_is_an_internal_error(tmp_path: Path) -> None:
    reader = SnapshotReader(*written(tmp_path, 1))
    with pytest.raises(ValueError, match=r"64 bytes.* 128"):
        reader.read("weight", 0, 128, memoryview(bytearray(64)))


def test_an_empty_range_reads_as_empty(tmp_path: Path) -> None:
    assert read(SnapshotReader(*written(tmp_path, 1)), "exp_avg", ByteRange(64, 64)) == (True, b"")


def separate_disks(tmp_path: Path, shards: int) -> list[SnapshotDirectory]:
    """Return folders of shards on their own disks; that of shard 0 has the manifest."""
    disks = [SnapshotDirectory(tmp_path / f"disk-{shard}") for shard in range(shards)]
    kinds = {"weight": WEIGHT, "exp_avg": MOMENT}
    parts = tuple(
        write_part(disk, VERSION, MIXED, shard, shards, kinds) for shard, disk in enumerate(disks)
    )
    disks[0].commit(manifest_of(VERSION, MIXED, parts))
    return disks


def test_each_shard_on_its_own_disk_restores_from_its_part(tmp_path: Path) -> None:
    disks, plan = separate_disks(tmp_path, 3), PartitionPlan(MIXED, 3)
    manifest = Manifest.from_json(disks[0].manifest(VERSION).as_json())

    assert disks[0].newest_valid() == (manifest, ())
    assert [part.file for part in disks[0].absent(manifest)] == [
        part.file for part in manifest.parts[1:]
    ]
    for shard, disk in enumerate(disks):
        reader = SnapshotReader(disk, manifest, needed=ranges(plan, shard))
        span = plan.range(shard, "trainable")
        assert read(reader, "exp_avg", span) == (True, MOMENT[span.start : span.stop].tobytes())
        assert reader.groups_json() == GROUPS


def test_a_part_on_another_disk_is_reported_with_the_searched_folder(tmp_path: Path) -> None:
    disks = separate_disks(tmp_path, 2)
    manifest = disks[0].manifest(VERSION)
    reader = SnapshotReader(disks[1], manifest)

    with pytest.raises(
        SnapshotError, match=rf"{manifest.parts[0].file} is missing in {disks[1].path(VERSION)}"
    ):
        read(reader, "exp_avg", ByteRange(0, 640))


def test_parts_collected_in_one_folder_are_checked(tmp_path: Path) -> None:
    disks = separate_disks(tmp_path, 2)
    manifest = disks[0].manifest(VERSION)
    stray = disks[1].path(VERSION) / manifest.parts[1].file
    gathered = disks[0].path(VERSION) / stray.name
    shutil.copy(stray, gathered)

    assert disks[0].absent(manifest) == []
    assert disks[0].verify(VERSION) == []
    gathered.write_bytes(stray.read_bytes()[:-1])
    assert len(disks[0].verify(VERSION)) == 1


def test_no_byte_of_a_damaged_part_is_used(tmp_path: Path) -> None:
    snapshots, manifest = written(tmp_path, 1)
    part = snapshots.path(VERSION) / manifest.parts[0].file
    raw = bytearray(part.read_bytes())
    raw[-1] ^= 1
    part.write_bytes(raw)
    reader = SnapshotReader(SnapshotDirectory(tmp_path), manifest)

    with pytest.raises(SnapshotError, match="damaged"):
        read(reader, "weight", ByteRange(0, 64))


def test_a_shard_without_bytes_needs_no_part(tmp_path: Path) -> None:
    _, manifest = written(tmp_path, 1)
    reader = SnapshotReader(
        SnapshotDirectory(tmp_path / "nothing here"), manifest, needed=[ByteRange(64, 64)]
    )

    assert (reader.steps(), reader.kinds()) == ({}, set())
    assert json.loads(reader.groups_json())[1]["lr"] == 0.2


def test_a_part_may_hold_empty_tensors(tmp_path: Path) -> None:
    snapshots = SnapshotDirectory(tmp_path)
    tensors = {
        "weight@0": torch.arange(600.0),
        "exp_avg@0": torch.zeros(0),
        "weight@2432": torch.zeros(0).bool(),
    }
    snapshots.commit(manifest_of(1, TINY, (snapshots.write_part(1, 0, 1, tensors, {}, "[]"),)))
    reader = SnapshotReader(snapshots, snapshots.manifest(1))

    assert read(reader, "weight", ByteRange(0, 2400)) == (
        True,
        torch.arange(600.0).numpy().tobytes(),
    )
    assert read(reader, "exp_avg", ByteRange(0, 64)) == (False, bytes(64))


def test_a_safetensors_file_that_is_no_part_is_refused(tmp_path: Path) -> None:
    snapshots = SnapshotDirectory(tmp_path)
    part = snapshots.write_part(1, 0, 1, {"no place": torch.zeros(3)}, {}, "[]")
    snapshots.commit(manifest_of(1, TINY, (part,)))

    with pytest.raises(SnapshotError, match=rf"{part.file}: not a part of a snapshot"):
        SnapshotReader(snapshots, snapshots.manifest(1)).kinds()


def test_a_part_that_changed_between_write_and_commit_is_not_committed(tmp_path: Path) -> None:
    snapshots = SnapshotDirectory(tmp_path)
    parts = write_parts(snapshots, 1, TINY, 2, {"weight": random_buffer(TINY, 1)})
    (snapshots.path(1) / parts[1].file).write_bytes(b"short")

    with pytest.raises(SnapshotError, match="5 bytes, its shard wrote"):
        snapshots.commit(manifest_of(1, TINY, parts))
    assert snapshots.versions() == []


def test_a_snapshot_without_any_local_part_is_not_committed(tmp_path: Path) -> None:
    parts = write_parts(
        SnapshotDirectory(tmp_path / "one"), 1, TINY, 2, {"weight": random_buffer(TINY, 1)}
    )

    with pytest.raises(SnapshotError, match="holds none of the parts of version 1"):
        SnapshotDirectory(tmp_path / "other").commit(manifest_of(1, TINY, parts))
