"""The order of a pass that a sampler gives.

It is the same on all workers, because they draw it with equally seeded generators.
"""

import hashlib
import operator
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data.distributed import DistributedSampler

from pscommon.core.data_loop import MAX_NAME_CHARACTERS, ORDER_CHARACTERS
from pscommon.core.errors import InvalidRequestError
from psworker.data.data_source import ORDER
from psworker.data.random_state import preserved_generators, reseed

MAX_INDICES = 2**28
"""Maximum number of samples in a pass that a sampler gives; each takes 8 bytes."""


class SampleOrder(NamedTuple):
    """The samples of a pass.

    Attributes:
        indices: Numbers of the samples, int64, batch after batch.
        starts: Position in `indices` where each batch begins, and where the last one ends, int64.
    """

    indices: NDArray[np.int64]
    starts: NDArray[np.int64]

    @property
    def batches(self) -> int:
        return len(self.starts) - 1

    @property
    def largest(self) -> int:
        """Number of samples in the largest batch, at least 1."""
        return max(1, int(np.diff(self.starts).max(initial=0)))

    @property
    def digest(self) -> str:
        """ORDER_CHARACTERS hexadecimal digits that identify the order."""
        digest = hashlib.blake2b(
            self.starts.astype("<i8").tobytes(), digest_size=ORDER_CHARACTERS // 2
        )
        digest.update(self.indices.astype("<i8").tobytes())
        return digest.hexdigest()

    def batch(self, number: int) -> list[int]:
        """Return the numbers of the samples of a batch."""
        found: list[int] = self.indices[self.starts[number] : self.starts[number + 1]].tolist()
        return found


def order_of(
    sampler: Iterable[Any], batch_size: int | None, drop_last: bool, seed: int, epoch: int
) -> SampleOrder:
    """Return the order of a pass. The global generators do not change.

    Args:
        sampler: Gives indices, or with batch_size None complete batches of them.
        batch_size: Samples per batch.
        drop_last: Leave out a smaller last batch.
        seed: Seeds the generators while the sampler runs.
        epoch: Seeds them too.

    Raises:
        InvalidRequestError: The sampler gives no indices, an empty batch, or too many indices.
    """
    with preserved_generators():
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
                f"Try: pass it as sampler"
            ) from error
        if not samples:
            raise InvalidRequestError(
                f"batch_sampler {name_of(sampler)} gave an empty batch. Try: leave it out"
            )
        sizes.append(len(samples))
        yield samples


def _indices(sampler: object, given: Iterator[Any]) -> NDArray[np.int64]:
    try:
        indices = np.fromiter(map(operator.index, islice(given, MAX_INDICES + 1)), np.int64)
    except (TypeError, OverflowError) as error:
        raise InvalidRequestError(
            f"sampler {name_of(sampler)} failed to give indices: {error}. Try: a sampler of 64-bit "
            f"integers"
        ) from error
    if len(indices) > MAX_INDICES:
        raise InvalidRequestError(
            f"sampler {name_of(sampler)} gave more than {MAX_INDICES} indices in a pass: perhaps "
            "it has no end. Try: a sampler whose passes end, in a loop over passes"
        )
    return indices


def name_of(sampler: object) -> str:
    return type(sampler).__name__[:MAX_NAME_CHARACTERS]


def check_sampler(option: str, sampler: Any) -> None:
    """Raise InvalidRequestError for a sampler that cannot order several passes.

    option: name of the argument, sampler or batch_sampler.
    """
    inner = getattr(sampler, "sampler", None)
    if isinstance(sampler, DistributedSampler) or isinstance(inner, DistributedSampler):
        raise InvalidRequestError(
            f"{option}=DistributedSampler would divide the data a second time: job.batches already "
            "gives each sample to one worker. Try: leave it out, with shuffle=True or False"
        )
    if not isinstance(sampler, Iterable):
        raise InvalidRequestError(
            f"{option}={sampler!r} is not iterable. Try: a sampler of torch.utils.data"
        )
    if isinstance(sampler, Iterator):
        raise InvalidRequestError(
            f"{option} is an iterator ({type(sampler).__name__}), which gives one pass only. Try: "
            "a list, or a sampler whose iter() begins a new pass"
        )
