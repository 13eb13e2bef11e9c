"""Find NaN and Inf in pushes."""

import math

import torch
from torch import Tensor

from pscommon.core.partition import ByteRange, cut
from pscommon.system.thread_team import ThreadTeam
from psserver.parameters.partition import DTYPES, RoleBuffers, SameGradientRange, ShardPartition
from psserver.parameters.staging import Staging


class FiniteCheck:
    """Checks the pushes of one shard. Thread-safe.

    weights: the shard's weights; a push may have NaN or Inf in a buffer where they have them.
    """

    def __init__(self, partition: ShardPartition, weights: RoleBuffers, team: ThreadTeam) -> None:
        self._partition = partition
        self._weights = weights
        self._team = team

    def find(self, staging: Staging) -> str:
        """Return the name of the first tensor with NaN or Inf in the push; empty if there is none.

        Checks gradients and floating buffers; of initial weights only the trainable ones.
        """
        memory = staging.require_memory()
        if not staging.gradients_are_finite:
            for piece in self._partition.pieces((staging.absent_here,)):
                if self._is_finite_piece(memory, piece):
                    continue
                # the padding between tensors may contain anything
                if tensor := self._find_in_piece(memory, piece):
                    return tensor
        return "" if staging.initial else self._find_in_buffers(memory)

    def replace(self, staging: Staging) -> None:
        """Replace NaN and Inf in the gradients by zeros."""
        for piece in self._partition.pieces((staging.absent_here,)):
            view = self._partition.view(staging.require_memory(), piece.dtype, *piece.span)
            view.nan_to_num_(0.0, 0.0, 0.0)

    def _is_finite_piece(self, memory: RoleBuffers, piece: SameGradientRange) -> bool:
        def check(part: ByteRange) -> bool:
            return _is_finite(self._partition.view(memory, piece.dtype, *part))

        return all(self._team.map(check, cut(piece.span, self._team.parts(piece.span.nbytes))))

    def _find_in_piece(self, memory: RoleBuffers, piece: SameGradientRange) -> str:
        partition = self._partition
        for tensor_slice in partition.slices(piece.start, piece.stop):
            span = tensor_slice.start, tensor_slice.stop
            if not _is_finite(partition.view(memory, piece.dtype, *span)):
                return partition.name(tensor_slice.tensor)
        return ""

    def _find_in_buffers(self, memory: RoleBuffers) -> str:
        partition = self._partition
        for segment in partition.segments["buffer"]:
            dtype = DTYPES[segment.dtype]
            if not dtype.is_floating_point or _is_finite(partition.view_segment(memory, segment)):
                continue
            for tensor_slice in partition.slices(segment.start, segment.stop):
                span = tensor_slice.start, tensor_slice.stop
                new, old = (
                    partition.view(buffers, dtype, *span) for buffers in (memory, self._weights)
                )
                if bool((old.isfinite() & ~new.isfinite()).any()):
                    return partition.name(tensor_slice.tensor)
        return ""


def _is_finite(flat: Tensor) -> bool:
    """Return whether all values are finite.

    A sum keeps NaN and Inf and is fast; the extremes tell whether the sum itself overflowed.
    """
    return math.isfinite(flat.sum().item()) or all(
        math.isfinite(extreme.item()) for extreme in torch.aminmax(flat)
    )
