"""Weighted means of what the pushes of a round hold, summed in the round's order, so equal bytes give equal bytes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from psserver.stretch import BLOCK

_HALF = (torch.float16, torch.bfloat16)


def weighted_sum(target: Tensor, parts: Sequence[Tensor], factors: Sequence[float]) -> None:
    """target = sum of factor * part, in the order given; target may be any of the parts.

    All are flat, of one length and floating dtype. 16-bit parts are summed in float32 and rounded once. A single part
    with factor 1 is taken over bit by bit.
    """
    if len(parts) == 1 and factors[0] == 1.0:
        if parts[0].data_ptr() != target.data_ptr():
            target.copy_(parts[0])
        return
    add = _sum_in_float32 if target.dtype in _HALF else _sum
    size = BLOCK // target.element_size()
    for blocks in zip(target.split(size), *(part.split(size) for part in parts), strict=True):
        add(blocks[0], blocks[1:], factors)


def _sum(target: Tensor, parts: Sequence[Tensor], factors: Sequence[float]) -> None:
    """In place where the first part is the target; else the target, if it comes later, would be overwritten: see below."""
    torch.mul(parts[0], factors[0], out=target)
    for part, factor in zip(parts[1:], factors[1:], strict=True):
        target.add_(part, alpha=factor)


def _sum_in_float32(target: Tensor, parts: Sequence[Tensor], factors: Sequence[float]) -> None:
    total = parts[0].float().mul_(factors[0])
    for part, factor in zip(parts[1:], factors[1:], strict=True):
        total.add_(part.float(), alpha=factor)
    target.copy_(total)
