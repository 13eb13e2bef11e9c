"""Average the pushes of a round, weighted by samples, in a fixed and therefore repeatable order."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from psserver.parameters.partition import blocks

_HALF = (torch.float16, torch.bfloat16)


def sum_gradients(target: Tensor, parts: Sequence[Tensor], factors: Sequence[float]) -> None:
    """Compute target = sum of factor * part, in the order given.

    All are flat, of one length and one floating dtype. The first part may be the target itself.
    16-bit parts are summed in float32 and rounded once. A single part with factor 1 is copied bit
    by bit.
    """
    if len(parts) == 1 and factors[0] == 1.0:
        if parts[0].data_ptr() != target.data_ptr():
            target.copy_(parts[0])
        return
    if target.dtype in _HALF:
        for block, *rest in blocks(target, *parts):
            _sum_in_float32(block, rest, factors)
        return
    torch.mul(parts[0], factors[0], out=target)
    for part, factor in zip(parts[1:], factors[1:], strict=True):
        target.add_(part, alpha=factor)


def mean_of_values(target: Tensor, parts: Sequence[Tensor], factors: Sequence[float]) -> None:
    """Compute the weighted mean of buffer values: flat parts of one length and one dtype.

    The mean is first + sum of factor * (part - first). So a value that is equal in all parts (a
    constant, an infinity in an attention mask) stays exact.
    """
    if len(parts) == 1:
        target.copy_(parts[0])
        return
    wide = torch.promote_types(target.dtype, torch.float32)
    for block, first, *rest in blocks(target, *parts):
        base = first.to(wide)
        mean = base.clone()
        for part, factor in zip(rest, factors[1:], strict=True):
            change = part.to(wide).sub(base).nan_to_num_(0.0, math.inf, -math.inf)
            mean.add_(change, alpha=factor)
        block.copy_(mean)


def _sum_in_float32(target: Tensor, parts: Sequence[Tensor], factors: Sequence[float]) -> None:
    total = parts[0].float().mul_(factors[0])
    for part, factor in zip(parts[1:], factors[1:], strict=True):
        total.add_(part.float(), alpha=factor)
    target.copy_(total)
