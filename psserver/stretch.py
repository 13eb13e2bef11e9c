"""One shard's stretch of the tape in memory: its trainable, buffer and frozen ranges end to end, as on the wire."""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch

from pscommon.core.model import ITEMSIZE, ROLES, Role
from pscommon.core.tape import ALIGN, Plan, Range, Segment, Slice

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEMSIZE}

BLOCK = 1 << 20
"""Bytes to work on at a time where intermediate results are needed, so that these are small and stay in the cache."""


class Piece(NamedTuple):
    """Tape [start, stop), padding included, of one dtype, for which the same pushes hold a gradient.

    holders: which of the pushes, by their place in the round's order; never empty.
    """

    dtype: torch.dtype
    start: int
    stop: int
    holders: tuple[int, ...]


class Stretch:
    """Where everything of `shard` lies in a buffer of `nbytes` bytes. Positions are always positions on the tape."""

    def __init__(self, plan: Plan, shard: int) -> None:
        self.plan = plan
        self.shard = shard
        self.ranges: dict[Role, Range] = {role: plan.range(shard, role) for role in ROLES}
        self.segments: dict[Role, list[Segment]] = {role: plan.segments(self.ranges[role]) for role in ROLES}
        self.step_nbytes = self.ranges["trainable"].nbytes + self.ranges["buffer"].nbytes
        self.nbytes = self.step_nbytes + self.ranges["frozen"].nbytes
        self.trainable = frozenset(held.tensor for held in plan.slices(self.ranges["trainable"]))
        self.pieces = lru_cache(maxsize=32)(self._pieces)

    def bytes_of(self, memory: torch.Tensor, span: Range) -> torch.Tensor:
        """The bytes of a range, which lies within one role, in a buffer laid out like this stretch."""
        before = 0
        for held in self.ranges.values():
            if held.start <= span.start and span.stop <= held.stop:
                return memory[before + span.start - held.start : before + span.stop - held.start]
            before += held.nbytes
        raise ValueError(f"{span} does not lie on shard {self.shard}")

    def view(self, memory: torch.Tensor, dtype: torch.dtype, start: int, stop: int) -> torch.Tensor:
        """The elements of tape [start, stop) in a buffer laid out like this stretch; flat, shares its memory."""
        return self.bytes_of(memory, Range(start, stop)).view(dtype)

    def slices(self, start: int, stop: int) -> Iterator[Slice]:
        """The tensors with bytes in tape [start, stop)."""
        return self.plan.slices(Range(start, stop))

    def name(self, tensor: int) -> str:
        return self.plan.spec.tensors[tensor].name

    def _pieces(self, absent: tuple[frozenset[int], ...]) -> tuple[Piece, ...]:
        """The trainable range cut where the dtype or the set of pushes that hold a gradient changes.

        absent: for each push the tensors without a gradient. What no push holds is left out. Cached as `pieces`:
        in the common case, nothing absent, there is one piece per dtype, and no work per tensor.
        """
        found: list[Piece] = []
        for segment in self.segments["trainable"]:
            for held in self.slices(segment.start, segment.stop):
                holders = tuple(push for push, missing in enumerate(absent) if held.tensor not in missing)
                piece = Piece(DTYPES[segment.dtype], held.start, padded(held.stop), holders)
                if found and found[-1] == piece._replace(start=found[-1].start, stop=piece.start):
                    found[-1] = found[-1]._replace(stop=piece.stop)
                elif holders:
                    found.append(piece)
        return tuple(found)


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
