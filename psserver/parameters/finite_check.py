"""Find NaN and Inf in pushes."""

import math

import torch
from torch import Tensor

from pscommon.core.partition import ByteRange, cut
from pscommon.system.thread_team import ThreadTeam
from psserver.parameters.partition import DTYPES, RoleBuffers, ShardPartition
from psserver.parameters.staging import Staging


def find_non_finite(staging: Staging, weights: RoleBuffers, team: ThreadTeam) -> str:
    """Return the name of the first tensor with NaN or Inf in a push; empty if there is none.

    Checks gradients and floating buffers; of initial weights only the trainable ones. A buffer may
    have such a value where the weights have one (an attention mask's -inf). Thread-safe.
    """
    partition, memory = staging.partition, staging.require_memory()
    if not staging.gradients_are_finite:
        for piece in partition.pieces((staging.absent_here,)):

            def check(part: ByteRange, dtype: torch.dtype = piece.dtype) -> bool:
                return _is_finite(partition.view(memory, dtype, *part))

            if all(team.map(check, cut(piece.span, team.parts(piece.span.nbytes)))):
                continue
            # the padding between tensors may contain anything
            for tensor in partition.slices(piece.start, piece.stop):
                if not check(ByteRange(tensor.start, tensor.stop)):
                    return partition.name(tensor.tensor)
    return "" if staging.initial else _find_in_buffers(partition, memory, weights)


def replace_non_finite(staging: Staging) -> None:
    """Replace NaN and Inf in the gradients by zeros."""
    partition = staging.partition
    for piece in partition.pieces((staging.absent_here,)):
        view = partition.view(staging.require_memory(), piece.dtype, *piece.span)
        view.nan_to_num_(0.0, 0.0, 0.0)


def _find_in_buffers(partition: ShardPartition, memory: RoleBuffers, weights: RoleBuffers) -> str:
    for segment in partition.segments["buffer"]:
        dtype = DTYPES[segment.dtype]
        if not dtype.is_floating_point or _is_finite(partition.view_segment(memory, segment)):
            continue
        for tensor in partition.slices(segment.start, segment.stop):
            new, old = (
                partition.view(buffers, dtype, tensor.start, tensor.stop)
                for buffers in (memory, weights)
            )
            if bool((old.isfinite() & ~new.isfinite()).any()):
                return partition.name(tensor.tensor)
    return ""


def _is_finite(flat: Tensor) -> bool:
    """Return whether all values are finite.

    A sum keeps NaN and Inf and is fast; the extremes tell whether the sum itself overflowed.
    """
    return math.isfinite(flat.sum().item()) or all(
        math.isfinite(extreme.item()) for extreme in torch.aminmax(flat)
    )
