"""Find NaN and Inf in the gradients and the buffers of a push."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from pscommon.parameters.partition import (
    DTYPES,
    RoleBuffers,
    SameGradientRange,
    ShardPartition,
)


def is_finite(flat: Tensor) -> bool:
    """Return whether all values are finite.

    A sum keeps NaN and Inf and is fast; the extremes tell whether the sum itself overflowed.
    """
    return math.isfinite(flat.sum().item()) or all(
        math.isfinite(extreme.item()) for extreme in torch.aminmax(flat)
    )


def find_in_gradients(
    partition: ShardPartition,
    memory: RoleBuffers,
    absent: frozenset[int],
    is_piece_finite: Callable[[SameGradientRange], bool] = lambda piece: False,
) -> str:
    """Return the name of the first tensor with NaN or Inf in its gradient; empty: there is none.

    absent: Tensors without a gradient.
    is_piece_finite: Tells at once that a piece has none; the padding may contain anything.
    """
    for piece in partition.pieces((absent,)):
        for span in () if is_piece_finite(piece) else partition.slices(piece.start, piece.stop):
            if not is_finite(partition.view(memory, piece.dtype, span.start, span.stop)):
                return partition.name(span.tensor)
    return ""


def find_in_buffers(partition: ShardPartition, memory: RoleBuffers, weights: RoleBuffers) -> str:
    """Return the name of the first buffer with NaN or Inf where `weights` has none; empty: none.

    An attention mask has -inf in both.
    """
    for segment in partition.segments["buffer"]:
        dtype = DTYPES[segment.dtype]
        if not dtype.is_floating_point or is_finite(partition.view_segment(memory, segment)):
            continue
        for span in partition.slices(segment.start, segment.stop):
            new, old = (
                partition.view(buffers, dtype, span.start, span.stop)
                for buffers in (memory, weights)
            )
            if bool((old.isfinite() & ~new.isfinite()).any()):
                return partition.name(span.tensor)
    return ""
