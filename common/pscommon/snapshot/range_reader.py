"""Reader of any byte range of the model from a snapshot of any number of shards."""

import json
from collections.abc import Iterable
from typing import NamedTuple

import torch
from safetensors import safe_open

from pscommon.core.errors import SnapshotError
from pscommon.core.model_spec import ROLES
from pscommon.core.partition import ByteRange, PartitionPlan
from pscommon.optim.specs import Scalars, scalars_from_json
from pscommon.snapshot.atomic_files import reading
from pscommon.snapshot.manifest import Manifest
from pscommon.snapshot.snapshot_dir import SnapshotDirectory


class TensorPiece(NamedTuple):
    """One tensor of a part.

    span: its byte range in the flat buffer.
    data: its bytes, mapped from the file.
    """

    span: ByteRange
    data: torch.Tensor


class SnapshotReader:
    """A snapshot's bytes by position in the flat buffer, and the rest of a shard's state.

    Each part is checked against the manifest before its first byte is used. Not thread-safe.

    shards: number of shards that wrote the snapshot.

    Args:
        needed: The byte ranges that will be read; None: all. Parts without bytes of them are never
            opened and may be missing.
    """

    def __init__(
        self,
        snapshots: SnapshotDirectory,
        manifest: Manifest,
        needed: Iterable[ByteRange] | None = None,
    ) -> None:
        self.model = manifest.model
        self.shards = manifest.shards
        self._snapshots = snapshots
        self._manifest = manifest
        self._plan = PartitionPlan(manifest.model, manifest.shards)
        spans = [ByteRange(0, self._plan.nbytes)] if needed is None else list(needed)
        self._needed = sorted({shard for span in spans for shard in self._holders(span)})
        self._parts: dict[int, _PartFile] = {}

    def read(self, kind: str, start: int, stop: int, out: memoryview) -> bool:
        """Fill `out` with bytes [start, stop) of the flat buffer of `kind`; padding becomes zeros.

        Return False if the snapshot does not have all of it (a state before its first step). The
        missing bytes of `out` are then zeros.

        Args:
            kind: "weight" or the name of an optimizer state.
            start: First byte.
            stop: End of the range.
            out: Memory of stop - start bytes.

        Raises:
            SnapshotError: A part is missing or damaged, or weights are incomplete.
            ValueError: `out` has another size.
        """
        span = ByteRange(start, stop)
        target = out.cast("B")
        if len(target) != span.nbytes:
            raise ValueError(f"the target has {len(target)} bytes, but the range has {span.nbytes}")
        if not target:
            return True
        gaps = self._fill(kind, span, torch.frombuffer(target, dtype=torch.uint8))
        missing = next((found for gap in gaps for found in self._plan.slices(gap)), None)
        if missing is not None and kind == "weight":
            name = self.model.tensors[missing.tensor].name
            folder = self._snapshots.path(self._manifest.version)
            files = ", ".join(
                self._manifest.parts[shard].file for shard in self._holders(ByteRange(*missing[1:]))
            )
            raise SnapshotError(f"{folder}: {files} does not hold all weights of {name}")
        return missing is None

    def kinds(self) -> set[str]:
        """Return what the parts contain: "weight" and names of optimizer states."""
        return {kind for shard in self._needed for kind in self._part(shard).pieces}

    def steps(self) -> dict[int, int]:
        """Return optimizer steps by index of tensor, for the tensors of the needed parts."""
        return {
            index: count
            for shard in self._needed
            for index, count in self._part(shard).steps.items()
        }

    def scalars(self) -> Scalars:
        """Return the optimizer's numbers for each tensor, for the tensors of the needed parts."""
        merged: dict[str, dict[int, float]] = {}
        for shard in self._needed:
            for name, values in self._part(shard).scalars.items():
                merged.setdefault(name, {}).update(values)
        return merged

    def groups_json(self) -> str:
        """Return the hyper-parameters of each parameter group as JSON, equal on all shards.

        A shard without any bytes (more shards than blocks of 64 bytes) needs no part. Its result is
        the hyper-parameters that were registered with the job.
        """
        if not self._needed:
            return json.dumps([dict(group) for group in self.model.groups])
        return self._part(self._needed[0]).groups_json

    def _fill(self, kind: str, span: ByteRange, target: torch.Tensor) -> list[ByteRange]:
        """Copy the available bytes, set the others to zero, and return the ranges of the others."""
        pieces = [
            piece
            for shard in self._holders(span)
            for piece in self._part(shard).pieces.get(kind, ())
        ]
        gaps, position = [], span.start
        for piece in sorted(pieces, key=lambda piece: piece.span):
            low, high = max(piece.span.start, position), min(piece.span.stop, span.stop)
            if low >= high:
                continue
            if low > position:
                gaps.append(ByteRange(position, low))
            offset = piece.span.start
            target[low - span.start : high - span.start] = piece.data[low - offset : high - offset]
            position = high
        if position < span.stop:
            gaps.append(ByteRange(position, span.stop))
        for gap in gaps:
            target[gap.start - span.start : gap.stop - span.start] = 0
        return gaps

    def _holders(self, span: ByteRange) -> list[int]:
        """Return the shards of the snapshot that have bytes of a range."""
        return [
            shard
            for shard in range(self.shards)
            if any(_overlap(self._plan.range(shard, role), span) for role in ROLES)
        ]

    def _part(self, shard: int) -> "_PartFile":
        if shard not in self._parts:
            self._parts[shard] = _PartFile(self._snapshots, self._manifest, shard)
        return self._parts[shard]


class _PartFile:
    """One checked part, memory-mapped: a read touches only the pages of its range."""

    def __init__(self, snapshots: SnapshotDirectory, manifest: Manifest, shard: int) -> None:
        path = snapshots.check(manifest.version, manifest.parts[shard])
        self.pieces: dict[str, list[TensorPiece]] = {}
        with reading(path), safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            tensors: dict[str, torch.Tensor] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        try:
            for key, tensor in tensors.items():
                self._add(key, tensor)
            self.steps = {
                int(index): int(count) for index, count in json.loads(metadata["steps"]).items()
            }
            self.groups_json = metadata["groups"]
            self.scalars = scalars_from_json(metadata.get("scalars", ""))
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise SnapshotError(f"{path}: not a part of a snapshot: {error!r}") from error

    def _add(self, key: str, tensor: torch.Tensor) -> None:
        kind, _, start = key.rpartition("@")
        data = tensor.reshape(-1).view(torch.uint8)
        self.pieces.setdefault(kind, []).append(
            TensorPiece(ByteRange(int(start), int(start) + data.numel()), data)
        )


def _overlap(one: ByteRange, other: ByteRange) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)
