"""The order that a sampler gives a pass: the same on all workers, because it is drawn under
generators seeded alike.
"""

import hashlib
import operator
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data.distributed import DistributedSampler

from pscommon.core.data_loop import NAME_LENGTH, ORDER_LENGTH
from pscommon.core.errors import InvalidRequestError
from psworker.data.random_state import generators_kept, reseed

ORDER = 2
"""Where FETCH and COMPUTE stand in the entropy of a batch."""

INDICES_LIMIT = 2**28
"""Samples in a pass that a sampler may give; they take 8 bytes each."""


class SampleOrder(NamedTuple):
    """The samples of a pass.

    indices: int64, batch after batch. starts: int64, where each batch begins in them, and where
    the last one ends.
    """

    indices: NDArray[np.int64]
    starts: NDArray[np.int64]

    @property
    def batches(self) -> int:
        return len(self.starts) - 1

    @property
    def largest(self) -> int:
        """Samples in the largest batch, at least 1."""
        return max(1, int(np.diff(self.starts).max(initial=0)))

    @property
    def digest(self) -> str:
        digest = hashlib.blake2b(self.starts.astype("<i8").tobytes(), digest_size=ORDER_LENGTH // 2)
        digest.update(self.indices.astype("<i8").tobytes())
        return digest.hexdigest()

    def batch(self, number: int) -> list[int]:
        """Indices of the samples of a batch."""
        found: list[int] = self.indices[self.starts[number] : self.starts[number + 1]].tolist()
        return found


def order_of(
    sampler: Iterable[Any], batch_size: int | None, drop_last: bool, seed: int, epoch: int
) -> SampleOrder:
    """Return the order of a pass. The global generators of torch, numpy and random are left as
    they were.

    Args:
        sampler: Gives indices, or with batch_size None whole batches of them.
        batch_size: Samples per batch.
        drop_last: Leave out the last batch where it is smaller.
        seed, epoch: What the generators are seeded by while the sampler runs.

    Raises:
        InvalidRequestError: It gives something else, an empty batch, or no end.
    """
    with generators_kept():
        reseed(seed % 2**64, epoch, 0, ORDER)
        if batch_size is not None:
            indices = _indices(sampler, iter(sampler))
            stop = len(indices) // batch_size * batch_size if drop_last else len(indices)
            return SampleOrder(
                indices[:stop], np.minimum(np.arange(0, stop + batch_size, batch_size), stop)
            )
        sizes: list[int] = []
        indices = _indices(sampler, chain.from_iterable(_batches(sampler, sizes)))
    return SampleOrder(indices, np.cumsum([0, *sizes], dtype=np.int64))


def _batches(sampler: Iterable[Any], sizes: list[int]) -> Iterator[list[Any]]:
    for batch in sampler:
        try:
            samples = list(batch)
        except TypeError as error:
            raise InvalidRequestError(
                f"batch_sampler {name_of(sampler)} gave {batch!r} instead of a list of indices. "
                f"Try: sampler="
            ) from error
        if not samples:
            raise InvalidRequestError(
                f"batch_sampler {name_of(sampler)} gave an empty batch: leave such batches out"
            )
        sizes.append(len(samples))
        yield samples


def _indices(sampler: object, given: Iterator[Any]) -> NDArray[np.int64]:
    try:
        indices = np.fromiter(map(operator.index, islice(given, INDICES_LIMIT + 1)), np.int64)
    except (TypeError, OverflowError) as error:
        raise InvalidRequestError(
            f"sampler {name_of(sampler)} failed to give indices: {error}. Try: a sampler of whole "
            f"numbers of 64 bits"
        ) from error
    if len(indices) > INDICES_LIMIT:
        raise InvalidRequestError(
            f"sampler {name_of(sampler)} gave more than {INDICES_LIMIT} indices in a pass, and "
            "perhaps has no end. Try: a sampler whose passes end, in a loop over passes"
        )
    return indices


def name_of(sampler: object) -> str:
    return type(sampler).__name__[:NAME_LENGTH]


def check_sampler(option: str, sampler: Any) -> None:
    """InvalidRequestError for what cannot order passes. option: sampler or batch_sampler."""
    inner = getattr(sampler, "sampler", None)
    if isinstance(sampler, DistributedSampler) or isinstance(inner, DistributedSampler):
        raise InvalidRequestError(
            f"{option}=DistributedSampler would divide the data twice: job.batches already gives "
            "each sample to one worker. Try: leave it out, with shuffle=True or False"
        )
    if not isinstance(sampler, Iterable):
        raise InvalidRequestError(
            f"{option}={sampler!r} is not iterable. Try: a sampler of torch.utils.data"
        )
    if isinstance(sampler, Iterator):
        raise InvalidRequestError(
            f"{option} is an iterator ({type(sampler).__name__}), which gives one pass only. Try: "
            "a list or a sampler whose iter() begins a new pass"
        )
