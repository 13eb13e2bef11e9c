"""One shard's stretch of the tape in memory: its trainable, buffer and frozen ranges."""

from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import NamedTuple

import torch

from pscommon.core.errors import InvalidRequestError
from pscommon.core.model_spec import ITEMSIZE, ROLES, Role
from pscommon.core.partition import ALIGN, ByteRange, PartitionPlan, TensorSlice, TrainableRange

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEMSIZE}

BLOCK = 1 << 20
"""Bytes to work on at a time where intermediate results are needed, so that these are small and
stay in the cache.
"""

VIEWS_KEPT = 64

Span = tuple[Role, int, int]
"""Bytes [start, stop) of one of the shard's ranges, named by its role."""


class RoleBuffers(dict[Role, torch.Tensor]):
    """The bytes of each of a shard's ranges; in a buffer of the server's they lie end to end, on
    a worker's tape apart.

    views: typed ones, and `bytes`, untyped ones: kept because making them costs more than a
    small step.
    """

    def __init__(self, ranges: dict[Role, torch.Tensor]) -> None:
        super().__init__(ranges)
        self.views: dict[tuple[torch.dtype, int, int], torch.Tensor] = {}
        self.bytes: dict[tuple[Role, int, int], memoryview] = {}

    def raw(self, role: Role, start: int, stop: int) -> memoryview:
        """Bytes [start, stop) of a range, writable."""
        found = self.bytes.get((role, start, stop))
        if found is None:
            if len(self.bytes) >= VIEWS_KEPT:
                self.bytes.clear()
            found = self.bytes[role, start, stop] = raw(self[role][start:stop])
        return found


class SameGradientRange(NamedTuple):
    """Tape [start, stop), padding included, of one dtype, for which the same pushes hold a
    gradient.

    holders: which of the pushes, by their place in the round's order; never empty.
    """

    dtype: torch.dtype
    start: int
    stop: int
    holders: tuple[int, ...]

    @property
    def span(self) -> ByteRange:
        return ByteRange(self.start, self.stop)


class ShardPartition:
    """Where everything of `shard` lies in memory, `nbytes` bytes in all. Positions are always
    positions on the tape.
    """

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
        self.trainable = frozenset(held.tensor for held in plan.slices(self.ranges["trainable"]))
        self.pieces = lru_cache(maxsize=32)(self._pieces)
        self.push = lru_cache(maxsize=32)(self._push)
        self.padding = lru_cache(maxsize=32)(self._padding)

    def end_to_end(self, buffer: torch.Tensor) -> RoleBuffers:
        """The ranges in a buffer of `nbytes` or (without what is frozen) `step_nbytes` bytes, in
        the wire's order.
        """
        trainable, step = self.ranges["trainable"].nbytes, self.step_nbytes
        return RoleBuffers(
            {
                "trainable": buffer[:trainable],
                "buffer": buffer[trainable:step],
                "frozen": buffer[step:],
            }
        )

    def on_tape(self, tape: torch.Tensor) -> RoleBuffers:
        """The ranges in a whole tape, a worker's. InvalidRequestError where it is not one of
        this model.
        """
        if len(tape) != self.plan.nbytes:
            raise InvalidRequestError(
                f"a tape of this model is {self.plan.nbytes} bytes, not {len(tape)}"
            )
        return RoleBuffers(
            {role: tape[held.start : held.stop] for role, held in self.ranges.items()}
        )

    def bytes_of(self, memory: RoleBuffers, span: ByteRange) -> torch.Tensor:
        """The bytes of a range, which lies within one role."""
        for role, held in self.ranges.items():
            if held.start <= span.start and span.stop <= held.stop:
                return memory[role][span.start - held.start : span.stop - held.start]
        raise ValueError(f"{span} does not lie on shard {self.shard}")

    def view(self, memory: RoleBuffers, dtype: torch.dtype, start: int, stop: int) -> torch.Tensor:
        """The elements of tape [start, stop); flat, shares the memory."""
        view = memory.views.get((dtype, start, stop))
        if view is None:
            if len(memory.views) >= VIEWS_KEPT:
                memory.views.clear()
            view = memory.views[dtype, start, stop] = self.bytes_of(
                memory, ByteRange(start, stop)
            ).view(dtype)
        return view

    def slices(self, start: int, stop: int) -> Iterator[TensorSlice]:
        """The tensors with bytes in tape [start, stop)."""
        return self.plan.slices(ByteRange(start, stop))

    def name(self, tensor: int) -> str:
        return self.plan.spec.tensors[tensor].name

    def _push(self, absent: frozenset[int], initial: bool) -> tuple[Span, ...]:
        """What a push without the tensors in `absent`, or (initial) one of all weights, holds.
        Cached as `push`.
        """
        spans = [
            *self.trainable_spans(absent),
            self.span("buffer"),
            *([self.span("frozen")] if initial else []),
        ]
        return tuple(span for span in spans if span[1] < span[2])

    def span(self, role: Role) -> Span:
        """All bytes of a range."""
        return role, 0, self.ranges[role].nbytes

    def trainable_spans(self, absent: Collection[int]) -> list[Span]:
        """The trainable range without the tensors in `absent`."""
        origin = self.ranges["trainable"].start
        kept = self.plan.without(self.ranges["trainable"], absent)
        return [("trainable", start - origin, stop - origin) for start, stop in kept]

    def _pieces(self, absent: tuple[frozenset[int], ...]) -> tuple[SameGradientRange, ...]:
        """The trainable range cut where the dtype or the set of pushes that hold a gradient
        changes.

        absent: for each push the tensors without a gradient. What no push holds is left out.
        Cached as `pieces`: in the common case, nothing absent, there is one piece per dtype, and
        no work per tensor.
        """
        found: list[SameGradientRange] = []
        for segment in self.segments["trainable"]:
            for held in self.slices(segment.start, segment.stop):
                holders = tuple(
                    push for push, missing in enumerate(absent) if held.tensor not in missing
                )
                piece = SameGradientRange(
                    DTYPES[segment.dtype], held.start, padded(held.stop), holders
                )
                if found and found[-1] == piece._replace(start=found[-1].start, stop=piece.start):
                    found[-1] = found[-1]._replace(stop=piece.stop)
                elif holders:
                    found.append(piece)
        return tuple(found)

    def _padding(self, piece: SameGradientRange) -> torch.Tensor:
        """Which elements of a piece belong to no tensor, in ascending order: a worker may send
        anything there.

        Cached as `padding`.
        """
        size = piece.dtype.itemsize
        gaps = [
            torch.arange(held.stop - piece.start, padded(held.stop) - piece.start, size)
            for held in self.slices(piece.start, piece.stop)
            if held.stop % ALIGN
        ]
        return torch.cat(gaps) // size if gaps else torch.empty(0, dtype=torch.int64)


class WorkerBuffer:
    """A worker's whole tape in memory that it shares, and a shard's ranges of it, which are
    found once.
    """

    def __init__(self, whole: torch.Tensor) -> None:
        self.whole = whole
        self._found: tuple[ShardPartition, RoleBuffers] | None = None

    def of(self, stretch: ShardPartition) -> RoleBuffers:
        """InvalidRequestError where it is not a tape of the stretch's model."""
        if self._found is None or self._found[0] is not stretch:
            self._found = stretch, stretch.on_tape(self.whole)
        return self._found[1]


def raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a flat tensor, writable."""
    return tensor.view(torch.uint8).numpy().data


def blocks(*tensors: torch.Tensor) -> "zip[tuple[torch.Tensor, ...]]":
    """Flat tensors of one length and dtype, side by side, in pieces of BLOCK bytes."""
    size = BLOCK // tensors[0].element_size()
    return zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)


def padded(position: int) -> int:
    """Where the padding after a tensor that ends at `position` ends."""
    return -(-position // ALIGN) * ALIGN
