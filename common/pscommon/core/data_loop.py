"""Loops over a data set: the batches of a loop, and the samples of each batch.

The mapping is the same on every machine and in every release.
"""

from dataclasses import dataclass
from functools import lru_cache
from string import hexdigits
from typing import Any

import numpy as np
from numpy.typing import NDArray

ORDER_CHARACTERS, MAX_NAME_CHARACTERS = 32, 100
"""Hexadecimal digits of an order's digest, and maximum length of a sampler's name."""


@dataclass(frozen=True, slots=True)
class LoopSpec:
    """`epochs` passes over `size` samples in batches.

    Batch numbers run through all epochs, from 0 to `total` - 1. `order`, `sampler` and `batches`
    are set only for samplers; such a loop has one epoch.

    loop: number of the loop in the script, from 0.
    size: samples in the data set.
    batch_size: samples in a batch; the last batch of an epoch may be smaller.
    epochs: number of passes.
    drop_last: leave out a last batch that is smaller than batch_size.
    shuffle: shuffle the samples in each epoch; otherwise batches follow the order of the data.
    seed: seed of the shuffle, any 64-bit integer.
    first_epoch: epoch e is shuffled by (seed, first_epoch + e). So a script that opens its epochs
        one by one sees the same orders as one that opens all of them together.
    order: digest of the order that a sampler gave. Workers are compared by it, because only they
        know the order itself.
    sampler: class name of the sampler.
    batches: number of batches of a batch sampler; their sizes vary, and batch_size is the largest.
    """

    loop: int
    size: int
    batch_size: int
    epochs: int = 1
    drop_last: bool = False
    shuffle: bool = True
    seed: int = 0
    first_epoch: int = 0
    order: str = ""
    sampler: str = ""
    batches: int = 0

    def __post_init__(self) -> None:
        if min(self.loop, self.size, self.epochs, self.first_epoch) < 0:
            raise ValueError(f"a loop's numbers cannot be negative: {self}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {self.batch_size}")
        self._check_order()

    def _check_order(self) -> None:
        if not self.order and not self.sampler and not self.batches:
            return
        if len(self.order) != ORDER_CHARACTERS or not set(self.order) <= set(hexdigits):
            raise ValueError(
                f"the order of a sampler is a digest of {ORDER_CHARACTERS} hexadecimal digits"
            )
        if not 0 < len(self.sampler) <= MAX_NAME_CHARACTERS:
            raise ValueError(
                f"the name of a sampler has 1 to {MAX_NAME_CHARACTERS} characters, not "
                f"{len(self.sampler)}"
            )
        if self.epochs != 1 or not 0 <= self.batches <= self.size:
            raise ValueError("a loop with a sampler has one epoch, and a batch at least one sample")

    @property
    def batches_in_epoch(self) -> int:
        if self.batches:
            return self.batches
        return self.size // self.batch_size if self.drop_last else -(-self.size // self.batch_size)

    @property
    def total(self) -> int:
        """Batches in all epochs."""
        return self.epochs * self.batches_in_epoch

    def epoch(self, number: int) -> int:
        """Return the epoch of a batch, counted over the whole script."""
        return self.first_epoch + number // self.batches_in_epoch

    def position(self, number: int) -> int:
        """Return the position of a batch in its epoch."""
        return number % self.batches_in_epoch

    def indices(self, number: int) -> NDArray[np.int64]:
        """Return the sample indices of a batch: int64, at most batch_size of them.

        Raises:
            IndexError: The loop has no such batch, or only the sampler knows its samples.
        """
        if not 0 <= number < self.total:
            raise IndexError(f"loop {self.loop} has batches 0 to {self.total - 1}, not {number}")
        if self.order:
            raise IndexError(
                f"the samples of loop {self.loop} are known to its sampler, {self.sampler}, alone"
            )
        start = self.position(number) * self.batch_size
        stop = min(start + self.batch_size, self.size)
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        return _order(self.size, self.seed, self.epoch(number))[start:stop]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, JSON-ready; LoopSpec(**d) is the inverse.

        Fields for samplers are present only if they are set.
        """
        values = {name: getattr(self, name) for name in self.__slots__}
        return {
            name: value
            for name, value in values.items()
            if value or name not in ("order", "sampler", "batches")
        }


@lru_cache(maxsize=4)
def _order(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the shuffled sample indices of an epoch, read-only.

    RandomState and SeedSequence are used because numpy guarantees that their streams never change.
    """
    bits = np.random.MT19937(np.random.SeedSequence([seed % 2**64, epoch]))
    order = np.arange(size, dtype=np.int64)
    np.random.RandomState(bits).shuffle(order)
    order.flags.writeable = False
    return order
