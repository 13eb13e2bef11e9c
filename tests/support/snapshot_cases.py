"""Snapshots of small jobs, written without servers."""

from pathlib import Path

import numpy as np
import torch

from pscommon.core.model_spec import ITEMSIZE, ROLES, ModelSpec, OptimizerSettings, TensorSpec
from pscommon.core.partition import ByteRange, PartitionPlan
from pscommon.snapshot import Manifest, SnapshotDirectory, SnapshotPart

GROUPS = '[{"lr": 0.1}, {"lr": 0.2}]'

MIXED = ModelSpec(
    (
        TensorSpec("embed.weight", (37, 5), "float32"),
        TensorSpec("norm.mean", (7,), "float64", "buffer"),
        TensorSpec("head.weight", (3, 11), "bfloat16", group=1),
        TensorSpec("head.scale", (), "float32", group=1),
        TensorSpec("norm.seen", (), "int64", "buffer"),
        TensorSpec("mask", (9, 9), "bool", "frozen"),
        TensorSpec("empty", (0, 4), "float32"),
        TensorSpec("half", (130,), "float16"),
    ),
    OptimizerSettings(
        "adam", ({"lr": 0.1, "betas": (0.9, 0.999)}, {"lr": 0.2, "betas": (0.9, 0.999)})
    ),
)

TINY = ModelSpec((TensorSpec("w", (600,), "float32"),), OptimizerSettings("sgd", ({"lr": 0.1},)))


def random_buffer(model: ModelSpec, seed: int) -> np.ndarray:
    """Return a flat buffer of random bytes (0 and 1 for bool) with zeros as padding."""
    plan, rng = PartitionPlan(model, 1), np.random.default_rng(seed)
    buffer = np.zeros(plan.nbytes, np.uint8)
    for index, spec in enumerate(model.tensors):
        start, stop = plan.extent(index)
        buffer[start:stop] = rng.integers(
            0, 2 if spec.dtype == "bool" else 256, stop - start, np.uint8
        )
    return buffer


def typed(buffer: np.ndarray, start: int, stop: int, dtype: str) -> torch.Tensor:
    tensor = torch.empty((stop - start) // ITEMSIZE[dtype], dtype=getattr(torch, dtype))
    tensor.view(torch.uint8).numpy()[:] = buffer[start:stop]
    return tensor


def shard_tensors(
    plan: PartitionPlan, shard: int, kinds: dict[str, np.ndarray]
) -> dict[str, torch.Tensor]:
    """Return the exports of a shard: weights of all roles, other kinds of trainable tensors."""
    tensors: dict[str, torch.Tensor] = {}
    for kind, buffer in kinds.items():
        for segment in plan.segments(plan.range(shard, "trainable")):
            tensors[f"{kind}@{segment.start}"] = typed(
                buffer, segment.start, segment.stop, segment.dtype
            )
    for role in ROLES[1:]:
        for piece in plan.slices(plan.range(shard, role)):
            dtype = plan.spec.tensors[piece.tensor].dtype
            tensors[f"weight@{piece.start}"] = typed(
                kinds["weight"], piece.start, piece.stop, dtype
            )
    return tensors


def write_parts(
    snapshots: SnapshotDirectory,
    version: int,
    model: ModelSpec,
    shards: int,
    kinds: dict[str, np.ndarray],
) -> tuple[SnapshotPart, ...]:
    return tuple(
        write_part(snapshots, version, model, shard, shards, kinds) for shard in range(shards)
    )


def write_part(
    snapshots: SnapshotDirectory,
    version: int,
    model: ModelSpec,
    shard: int,
    shards: int,
    kinds: dict[str, np.ndarray],
) -> SnapshotPart:
    plan = PartitionPlan(model, shards)
    spans = [plan.range(shard, role) for role in ROLES]
    steps = {piece.tensor: version - piece.tensor for span in spans for piece in plan.slices(span)}
    return snapshots.write_part(
        version, shard, shards, shard_tensors(plan, shard, kinds), steps, GROUPS
    )


def manifest_of(version: int, model: ModelSpec, parts: tuple[SnapshotPart, ...]) -> Manifest:
    return Manifest(
        job="job-1",
        version=version,
        index=version + 3,
        shards=len(parts),
        created="2026-11-21T03:00:00+00:00",
        model=model,
        parts=parts,
        coordinator={"loops": [{"epoch": 1}]},
        libraries={"torch": torch.__version__},
    )


def save(
    snapshots: SnapshotDirectory,
    version: int,
    model: ModelSpec,
    shards: int,
    kinds: dict[str, np.ndarray],
) -> Path:
    """Write a complete snapshot; return its folder."""
    parts = write_parts(snapshots, version, model, shards, kinds)
    return snapshots.commit(manifest_of(version, model, parts))


def save_tiny(snapshots: SnapshotDirectory, version: int, shards: int = 1) -> Path:
    """Write a snapshot of one small tensor that depends on the version."""
    return save(snapshots, version, TINY, shards, {"weight": random_buffer(TINY, version)})


def ranges(plan: PartitionPlan, shard: int) -> list[ByteRange]:
    return [plan.range(shard, role) for role in ROLES]
