"""The sums of gradients under policy allreduce: where the workers add up their shares of the mean.

A share is computed in pieces of a size that fits the cache: each is copied, scaled and checked for
NaN and Inf while it is there. Half precision is summed in float32 and rounded once, as on servers.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import compress
from typing import NamedTuple

import torch
from torch import Tensor

from pscommon.core.errors import NonFiniteError
from pscommon.core.log_entries import clip_factor
from pscommon.parameters.finite_values import is_finite
from pscommon.parameters.means import blocks_of_mean, squares_of_mean, total
from pscommon.parameters.partition import BLOCK_BYTES, ShardPartition
from psworker.model.adapter import ModelAdapter

BLOCK_ELEMENTS = BLOCK_BYTES // torch.float32.itemsize

ADDED_ELEMENTS = 8 * BLOCK_ELEMENTS
"""Elements that are added up in one operation: several operations at a time keep gloo's threads and
the network busy.
"""


class _Run(NamedTuple):
    """Tensors [first, last) of the group, which lie together.

    Attributes:
        flat: Their elements, and the padding between them.
        views: The same by tensor.
        complete: What can be added up once they are there.
    """

    first: int
    last: int
    flat: Tensor
    views: Sequence[Tensor]
    complete: Sequence[Tensor]


class GradientSums:
    """The sums in one memory.

    Attributes:
        memory: Bytes of the trainable tensors and the buffers.
        buffers: The same by role; complete after `finish`.
    """

    def __init__(self, partition: ShardPartition, adapter: ModelAdapter, memory: Tensor) -> None:
        """memory: Zeros. No other code writes to it but the adding up."""
        self.memory, self.buffers = memory, partition.split_packed(memory)
        self._partition, self._trainable = partition, adapter.trainable
        self._pieces = partition.pieces((frozenset(),))
        self._flat = [partition.view(self.buffers, p.dtype, *p.span) for p in self._pieces]
        self._added = [
            flat if flat.itemsize >= torch.float32.itemsize else torch.zeros(len(flat))
            for flat in self._flat
        ]
        self._runs = [*self._find_runs()]

    def _find_runs(self) -> Iterator[_Run]:
        """Yield runs of at most a block, and larger tensors by themselves."""
        extents, tensors, first = self._trainable.extents, self._trainable.tensors, 0
        for piece, added in zip(self._pieces, self._added, strict=True):
            size, begun = piece.dtype.itemsize, 0
            while first < len(extents) and extents[first].start < piece.stop:
                limit, last = min(piece.stop, extents[first].start + BLOCK_BYTES), first + 1
                while last < len(extents) and extents[last].stop <= limit:
                    last += 1
                is_last = last == len(extents) or extents[last].start >= piece.stop
                places = [
                    [(at - piece.start) // size for at in extent] for extent in extents[first:last]
                ]
                views = [
                    added[low:high].view(tensor.shape)
                    for (low, high), tensor in zip(places, tensors[first:last], strict=True)
                ]
                start, stop = places[0][0], places[-1][1]
                complete: tuple[Tensor, ...] = ()
                if is_last or stop - begun >= ADDED_ELEMENTS:
                    complete, begun = torch.split(added[begun:stop], ADDED_ELEMENTS), stop
                yield _Run(first, last, added[start:stop], views, complete)
                first = last

    def fill(self, grads: Sequence[Tensor | None], share: float) -> Iterator[Tensor]:
        """Write this worker's share of the gradients; one that is None counts as zero.

        Yields:
            Flat tensors that are complete: their adding up can begin. Each worker has the same.

        Raises:
            NonFiniteError: A gradient has NaN or Inf.
        """
        for run in self._runs:
            if not _fill(run, grads[run.first : run.last], share):
                self._check(grads)
            yield from run.complete

    def _check(self, grads: Sequence[Tensor | None]) -> None:
        for name, grad in zip(self._trainable.names, grads, strict=True):
            if grad is not None and not is_finite(grad.reshape(-1)):
                raise NonFiniteError(f"the gradient of {name} has NaN or Inf", "NON_FINITE")

    def finish(self, clip_norm: float | None) -> None:
        """Round the sums of half precision, and clip all: the workers have added them up."""
        for flat, added in zip(self._flat, self._added, strict=True):
            if flat is not added:
                flat.copy_(added)
        if clip_norm is None:
            return
        squares = list[float]()
        for piece, flat in zip(self._pieces, self._flat, strict=True):
            for block in blocks_of_mean([flat], [1.0], self._partition.padding(piece)):
                squares += squares_of_mean(block)
        factor = clip_factor(clip_norm, total(squares))
        for flat in self._flat if factor < 1.0 else ():
            flat.mul_(factor)


def _fill(run: _Run, sources: Sequence[Tensor | None], share: float) -> bool:
    """Write a run; return whether a sum over it is finite."""
    given = [grad for grad in sources if grad is not None]
    flat, views, sums = run.flat, run.views, 0.0
    if len(given) < len(sources):
        flat.zero_()
        views = [*compress(views, [grad is not None for grad in sources])]
    if len(flat) > BLOCK_ELEMENTS and given and given[0].is_contiguous():
        blocks = (torch.split(each, BLOCK_ELEMENTS) for each in (flat, given[0].view(-1)))
        for block, source in zip(*blocks, strict=True):
            # multiplied first, half precision would be rounded before the sum
            sums += block.copy_(source).mul_(share).sum().item()
    elif given:
        torch._foreach_copy_([*views], given)
        sums = flat.mul_(share).sum().item()
    return math.isfinite(sums)
