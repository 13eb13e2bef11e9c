"""Map one shard's partition of the flat buffer to memory: trainable, buffer and frozen ranges."""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

import torch

from pscommon.core.errors import InvalidRequestError
from pscommon.core.model_spec import ITEMSIZE, ROLES, Role
from pscommon.core.partition import (
    ALIGNMENT_BYTES,
    ByteRange,
    PartitionPlan,
    TensorSlice,
    TrainableRange,
    padded,
)

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEMSIZE}

BLOCK_BYTES = 1 << 20
"""Bytes processed at a time if intermediate results are needed: these then fit into the cache."""

MAX_CACHED_VIEWS = 64


class RoleBuffers(dict[Role, torch.Tensor]):
    """The bytes of each of a shard's ranges, by role.

    They are adjacent in the server's memory, and apart in a worker's flat buffer.

    ranges: positions of the bytes in the flat buffer.
    views: cached typed views; creating one costs more than a small step.
    bytes: cached untyped views, by their range in the flat buffer.
    """

    def __init__(self, tensors: dict[Role, torch.Tensor], ranges: Mapping[Role, ByteRange]) -> None:
        super().__init__(tensors)
        self.ranges = ranges
        self.views: dict[tuple[torch.dtype, int, int], torch.Tensor] = {}
        self.bytes: dict[ByteRange, memoryview] = {}

    def bytes_of(self, span: ByteRange) -> torch.Tensor:
        """Return the bytes of a range of the flat buffer, which lies within one role."""
        for role, covered in self.ranges.items():
            if covered.start <= span.start and span.stop <= covered.stop:
                return self[role][span.start - covered.start : span.stop - covered.start]
        raise ValueError(f"{span} does not lie on this shard")

    def raw(self, span: ByteRange) -> memoryview:
        """Return the bytes of a range of the flat buffer, which lies within one role, writable."""
        found = self.bytes.get(span)
        if found is None:
            if len(self.bytes) >= MAX_CACHED_VIEWS:
                self.bytes.clear()
            found = self.bytes[span] = raw(self.bytes_of(span))
        return found


class SameGradientRange(NamedTuple):
    """Bytes [start, stop), padding included, of one dtype, with gradients from the same pushes.

    holders: indices, in the round's order, of the pushes with a gradient; never empty.
    """

    dtype: torch.dtype
    start: int
    stop: int
    holders: tuple[int, ...]

    @property
    def span(self) -> ByteRange:
        return ByteRange(self.start, self.stop)


class ShardPartition:
    """The layout of one shard's `nbytes` bytes. All positions are in the flat buffer."""

    def __init__(self, plan: PartitionPlan, shard: int) -> None:
        self.plan = plan
        self.shard = shard
        self.ranges: dict[Role, ByteRange] = {role: plan.range(shard, role) for role in ROLES}
        self.segments: dict[Role, list[TrainableRange]] = {
            role: plan.segments(self.ranges[role]) for role in ROLES
        }
        self.step_nbytes = self.ranges["trainable"].nbytes + self.ranges["buffer"].nbytes
        self.nbytes = self.step_nbytes + self.ranges["frozen"].nbytes
        dtypes = {segment.dtype for segment in self.segments["trainable"]}
        self.only_dtype = DTYPES[dtypes.pop()] if len(dtypes) == 1 else None
        self.trainable = frozenset(
            tensor_slice.tensor for tensor_slice in plan.slices(self.ranges["trainable"])
        )
        self.pieces = lru_cache(maxsize=32)(self._pieces)
        self.pushed_ranges = lru_cache(maxsize=32)(self._pushed_ranges)
        self.padding = lru_cache(maxsize=32)(self._padding)

    def split_packed(self, buffer: torch.Tensor) -> RoleBuffers:
        """Return the ranges of a buffer that has them one after another, in the wire's order.

        The buffer has `nbytes` bytes, or `step_nbytes` without the frozen range.
        """
        trainable, step = self.ranges["trainable"].nbytes, self.step_nbytes
        return RoleBuffers(
            {
                "trainable": buffer[:trainable],
                "buffer": buffer[trainable:step],
                "frozen": buffer[step:],
            },
            self.ranges,
        )

    def split_flat(self, flat: torch.Tensor) -> RoleBuffers:
        """Return the ranges of a whole flat buffer, a worker's.

        Raises InvalidRequestError if its size is not the model's.
        """
        if len(flat) != self.plan.nbytes:
            raise InvalidRequestError(
                f"a flat buffer of this model has {self.plan.nbytes} bytes, not {len(flat)}"
            )
        return RoleBuffers(
            {role: flat[span.start : span.stop] for role, span in self.ranges.items()}, self.ranges
        )

    def view(self, memory: RoleBuffers, dtype: torch.dtype, start: int, stop: int) -> torch.Tensor:
        """Return the elements of bytes [start, stop) of the flat buffer; shares the memory."""
        view = memory.views.get((dtype, start, stop))
        if view is None:
            if len(memory.views) >= MAX_CACHED_VIEWS:
                memory.views.clear()
            span = ByteRange(start, stop)
            view = memory.views[dtype, start, stop] = memory.bytes_of(span).view(dtype)
        return view

    def view_segment(self, memory: RoleBuffers, segment: TrainableRange) -> torch.Tensor:
        """Return the elements of a segment; shares the memory."""
        return self.view(memory, DTYPES[segment.dtype], segment.start, segment.stop)

    def slices(self, start: int, stop: int) -> Iterator[TensorSlice]:
        """Return the tensors with bytes in [start, stop) of the flat buffer."""
        return self.plan.slices(ByteRange(start, stop))

    def name(self, tensor: int) -> str:
        return self.plan.spec.tensors[tensor].name

    def _pushed_ranges(self, absent: frozenset[int], initial: bool) -> tuple[ByteRange, ...]:
        """Return the bytes on this shard of a push that names no parts.

        They are without the tensors in `absent`, and with frozen ones if `initial`. Cached as
        `pushed_ranges`.
        """
        spans = [
            *self.plan.without(self.ranges["trainable"], absent),
            self.ranges["buffer"],
            *([self.ranges["frozen"]] if initial else []),
        ]
        return tuple(span for span in spans if span.nbytes)

    def _pieces(self, absent: tuple[frozenset[int], ...]) -> tuple[SameGradientRange, ...]:
        """Cut the trainable range where the dtype or the set of pushes with a gradient changes.

        absent: for each push, the tensors without a gradient. Ranges without any gradient are left
            out. Cached as `pieces`: usually nothing is absent, and there is one piece per dtype.
        """
        found: list[SameGradientRange] = []
        for segment in self.segments["trainable"]:
            for tensor_slice in self.slices(segment.start, segment.stop):
                holders = tuple(
                    push
                    for push, missing in enumerate(absent)
                    if tensor_slice.tensor not in missing
                )
                piece = SameGradientRange(
                    DTYPES[segment.dtype], tensor_slice.start, padded(tensor_slice.stop), holders
                )
                if found and found[-1] == piece._replace(start=found[-1].start, stop=piece.start):
                    found[-1] = found[-1]._replace(stop=piece.stop)
                elif holders:
                    found.append(piece)
        return tuple(found)

    def _padding(self, piece: SameGradientRange) -> torch.Tensor:
        """Return the elements of a piece that belong to no tensor, ascending.

        A worker may send any values there. Cached as `padding`.
        """
        size = piece.dtype.itemsize
        gaps = [
            torch.arange(
                tensor_slice.stop - piece.start, padded(tensor_slice.stop) - piece.start, size
            )
            for tensor_slice in self.slices(piece.start, piece.stop)
            if tensor_slice.stop % ALIGNMENT_BYTES
        ]
        return torch.cat(gaps) // size if gaps else torch.empty(0, dtype=torch.int64)


class WorkerBuffer:
    """A worker's whole flat buffer in shared memory. The shard's ranges of it are cached."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self._ranges: tuple[ShardPartition, RoleBuffers] | None = None

    def find_ranges(self, partition: ShardPartition) -> RoleBuffers:
        """Return the shard's ranges. Raises InvalidRequestError if the size is not the model's."""
        if self._ranges is None or self._ranges[0] is not partition:
            self._ranges = partition, partition.split_flat(self.flat)
        return self._ranges[1]


def raw(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a flat tensor, writable."""
    return tensor.view(torch.uint8).numpy().data


def blocks(*tensors: torch.Tensor) -> "zip[tuple[torch.Tensor, ...]]":
    """Split flat tensors of one length and dtype into pieces of BLOCK_BYTES bytes, side by side."""
    size = BLOCK_BYTES // tensors[0].element_size()
    return zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)
