"""A loop over a data set: which samples the batch of a number stands for, the same on every
machine and for ever.
"""

from dataclasses import dataclass
from functools import lru_cache
from string import hexdigits
from typing import Any

import numpy as np
from numpy.typing import NDArray

ORDER_LENGTH, NAME_LENGTH = 32, 100
"""Letters of an order's digest, and at most of a sampler's name."""


@dataclass(frozen=True, slots=True)
class LoopSpec:
    """`epochs` passes over `size` samples in batches; batch numbers run through all epochs from
    0 to `total` - 1.

    loop: the how-many-eth loop of the script, from 0. batch_size: samples a batch; the last
    batch of an epoch may be smaller, with drop_last it is left out instead. seed: of the
    shuffle, any 64-bit integer; without `shuffle`, batches go through the data in order.
    first_epoch: the shuffle of epoch e is that of (seed, first_epoch + e), so that a script
    which calls for its epochs one at a time sees the orders that one call for all of them would
    have given.

    order: digest of the order that a sampler gave, by which workers are compared; only they know
    the order itself. sampler: its class. batches: how many batches a batch sampler gave; their
    sizes vary, and batch_size is the largest. These are set for samplers only; they then make
    one epoch.
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
        if len(self.order) != ORDER_LENGTH or not set(self.order) <= set(hexdigits):
            raise ValueError(
                f"the order of a sampler is a digest of {ORDER_LENGTH} hexadecimal digits"
            )
        if not 0 < len(self.sampler) <= NAME_LENGTH:
            raise ValueError(
                f"the name of a sampler has 1 to {NAME_LENGTH} letters, not {len(self.sampler)}"
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
        """The epoch, counted over the whole script, that a batch belongs to."""
        return self.first_epoch + number // self.batches_in_epoch

    def position(self, number: int) -> int:
        """The batch's place in its epoch."""
        return number % self.batches_in_epoch

    def indices(self, number: int) -> NDArray[np.int64]:
        """The samples of a batch: int64, at most batch_size of them; IndexError for a number
        that the loop lacks.
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
        """JSON-ready; LoopSpec(**d) is the way back. Without what is only set for samplers."""
        of_samplers = {"order": self.order, "sampler": self.sampler, "batches": self.batches}
        return {
            "loop": self.loop,
            "size": self.size,
            "batch_size": self.batch_size,
            "epochs": self.epochs,
            "drop_last": self.drop_last,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "first_epoch": self.first_epoch,
            **{key: value for key, value in of_samplers.items() if value},
        }


@lru_cache(maxsize=4)
def _order(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """All samples, shuffled. RandomState and SeedSequence: numpy promises never to change what
    they draw.
    """
    bits = np.random.MT19937(np.random.SeedSequence([seed % 2**64, epoch]))
    order = np.arange(size, dtype=np.int64)
    np.random.RandomState(bits).shuffle(order)
    order.flags.writeable = False
    return order
