"""Partition of the model's bytes among shards.

All tensors form one flat buffer: trainable tensors first, then buffers, then frozen ones. Within
a role they are sorted by dtype, then by parameter group or treatment, then by registration order.
Each tensor starts on a multiple of 64 bytes. The section of each role is cut into equal byte
ranges, one for each shard. So a large tensor is sliced, small ones are packed, and shards are
balanced to within 64 bytes a role. Shards, workers and messages handle a few long byte ranges
instead of thousands of tensors.

Cuts are also multiples of 64 bytes, a whole number of SIMD registers. So an element is processed
by the same vector instruction for any number of shards, and gets the same bits.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from pscommon.core.model_spec import FLOATING, ROLES, ModelSpec, Role, TensorSpec

ALIGNMENT_BYTES = 64

PIECE_COUNT = 32
MIN_PIECE_BYTES, MAX_PIECE_BYTES = 64 << 10, 1 << 20


class ByteRange(NamedTuple):
    """Bytes [start, stop) of the flat buffer."""

    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class TensorSlice(NamedTuple):
    """The part of one tensor in a byte range.

    tensor: index into ModelSpec.tensors.
    start, stop: positions in the flat buffer, without padding.
    """

    tensor: int
    start: int
    stop: int


class TrainableRange(NamedTuple):
    """A byte range of one role with one dtype and one parameter group; padding included.

    is_first: An update takes the values of buffers from its first push.
    """

    dtype: str
    group: int
    start: int
    stop: int
    is_first: bool = False


def cut(span: ByteRange, parts: int) -> list[ByteRange]:
    """Divide a byte range equally, at multiples of ALIGNMENT_BYTES; parts may be empty."""
    blocks = span.nbytes // ALIGNMENT_BYTES
    return [
        ByteRange(*pair)
        for pair in pairwise(
            span.start + blocks * part // parts * ALIGNMENT_BYTES for part in range(parts + 1)
        )
    ]


def piece_nbytes(nbytes: int) -> int:
    """Return the size of the pieces of a pipelined transfer, in bytes.

    Only about the first and the last piece cannot overlap with computation, so pieces are a small
    part of the whole. But each piece costs a message; pieces of 1 MiB are the cheapest by the byte.

    Args:
        nbytes: Size of the whole transfer, in bytes.
    """
    return max(MIN_PIECE_BYTES, min(MAX_PIECE_BYTES, nbytes // PIECE_COUNT))


def padded(nbytes: int) -> int:
    """Return the next multiple of ALIGNMENT_BYTES."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True)
class PartitionPlan:
    """The location of every byte of a model on its shards.

    It is a pure function of the attributes, the same on every machine.

    spec: the model.
    shards: number of shards.
    """

    spec: ModelSpec
    shards: int

    def __post_init__(self) -> None:
        if self.shards < 1:
            raise ValueError(f"a job needs at least one shard, not {self.shards}")

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Indices into spec.tensors, in flat buffer order."""
        tensors = self.spec.tensors
        return tuple(sorted(range(len(tensors)), key=lambda i: (*_buffer_order_key(tensors[i]), i)))

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Start of each tensor in the flat buffer, by index into spec.tensors."""
        starts, position = [0] * len(self.spec.tensors), 0
        for index in self.order:
            starts[index] = position
            position += padded(self.spec.tensors[index].nbytes)
        return tuple(starts)

    @cached_property
    def _sections(self) -> dict[Role, ByteRange]:
        lengths = {
            role: sum(padded(t.nbytes) for t in self.spec.tensors if t.role == role)
            for role in ROLES
        }
        sections, position = {}, 0
        for role in ROLES:
            sections[role] = ByteRange(position, position + lengths[role])
            position += lengths[role]
        return sections

    @property
    def nbytes(self) -> int:
        """Size of the flat buffer, in bytes."""
        return self._sections[ROLES[-1]].stop

    def section(self, role: Role) -> ByteRange:
        """Return the byte range of a role."""
        return self._sections[role]

    def range(self, shard: int, role: Role) -> ByteRange:
        """Return the byte range of a role on a shard.

        It is empty if there are more shards than blocks of 64 bytes.
        """
        return self._ranges[role][shard]

    @cached_property
    def _ranges(self) -> dict[Role, list[ByteRange]]:
        return {role: cut(section, self.shards) for role, section in self._sections.items()}

    def slices(self, span: ByteRange) -> Iterator[TensorSlice]:
        """Yield the tensor slices in `span`, in flat buffer order."""
        for index in self.order[self._first_after(span.start) :]:
            start, stop = self.extent(index)
            if start >= span.stop:
                return
            if max(start, span.start) < min(stop, span.stop):
                yield TensorSlice(index, max(start, span.start), min(stop, span.stop))

    def extent(self, tensor: int) -> ByteRange:
        """Return the byte range of a whole tensor, without padding."""
        start = self.starts[tensor]
        return ByteRange(start, start + self.spec.tensors[tensor].nbytes)

    def segments(self, span: ByteRange) -> list[TrainableRange]:
        """Split the range `span` where dtype, parameter group or treatment changes."""
        found: list[TrainableRange] = []
        for index in self.order[self._first_after(span.start) :]:
            tensor, start = self.spec.tensors[index], self.starts[index]
            if start >= span.stop:
                break
            start, stop = max(start, span.start), min(start + padded(tensor.nbytes), span.stop)
            if start >= stop:
                continue
            is_first = tensor.treatment == "first" or tensor.dtype not in FLOATING
            piece = TrainableRange(tensor.dtype, tensor.group, start, stop, is_first)
            if found and found[-1] == piece._replace(start=found[-1].start, stop=start):
                found[-1] = found[-1]._replace(stop=stop)
            else:
                found.append(piece)
        return found

    def without(self, span: ByteRange, absent: Collection[int]) -> list[ByteRange]:
        """Return `span` without the 64-byte blocks of the tensors in `absent`.

        The result is the shortest list of ranges, ascending.
        """
        if not absent:
            return [span] if span.start < span.stop else []
        extents = [
            (self.starts[i], self.starts[i] + padded(self.spec.tensors[i].nbytes)) for i in absent
        ]
        remaining, position = [], span.start
        for start, stop in sorted(extent for extent in extents if extent[0] < extent[1]):
            if position < min(start, span.stop):
                remaining.append(ByteRange(position, min(start, span.stop)))
            position = max(position, stop)
        if position < span.stop:
            remaining.append(ByteRange(position, span.stop))
        return remaining

    def shard_nbytes(self, shard: int) -> int:
        """Return the size of a shard's part of the model, in bytes."""
        return sum(self.range(shard, role).nbytes for role in ROLES)

    @cached_property
    def digest(self) -> str:
        """Digest of the whole plan, compared when a worker connects.

        It is equal on two machines exactly when they place every byte alike.
        """
        rows = [(t.name, list(t.shape), t.dtype, t.role, t.group) for t in self.spec.tensors]
        cuts = [[list(self.range(shard, role)) for role in ROLES] for shard in range(self.shards)]
        return hashlib.sha256(json.dumps([rows, list(self.starts), cuts]).encode()).hexdigest()

    def _first_after(self, position: int) -> int:
        """Return the place in `order` of the last tensor that starts at or before a position."""
        return max(0, bisect_right(self._ordered_starts, position) - 1)

    @cached_property
    def _ordered_starts(self) -> list[int]:
        return [self.starts[index] for index in self.order]


def _buffer_order_key(tensor: TensorSpec) -> tuple[int, str, int, bool]:
    return ROLES.index(tensor.role), tensor.dtype, tensor.group, tensor.treatment == "first"
