"""Seeds and preserves the global random generators of torch, numpy and random."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch


class ScriptSeed:
    """The seed that the script has given torch's generator, also after `reseed` gave it another."""

    def __init__(self) -> None:
        self._own: int | None = None  # that of the last `reseed`
        self._before = 0

    def read(self) -> int:
        newest = torch.default_generator.initial_seed()
        return self._before if newest == self._own else newest

    def keep(self, own: int) -> None:
        """Record that `reseed` is about to give this seed."""
        self._before, self._own = self.read(), own

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Go back at the end of the `with` block, where the generator goes back, too."""
        before = self._own, self._before
        try:
            yield
        finally:
            self._own, self._before = before


script_seed = ScriptSeed()

_has_accelerator = cache(torch.accelerator.is_available)


def reseed(*entropy: int) -> None:
    """Seed the global generators of torch, numpy and random.

    Args:
        entropy: Non-negative integers. The same integers give the same random numbers.
    """
    words = np.random.SeedSequence(entropy).generate_state(4)
    seed = int(words[0]) << 32 | int(words[1])
    script_seed.keep(seed)
    _seed_torch(seed)
    np.random.seed(words)
    random.seed(int(words[2]) << 32 | int(words[3]))


def _seed_torch(seed: int) -> None:
    """Do what `torch.manual_seed` does, without the stack traces that it makes for each kind of
    accelerator that is not initialized. They take 0.2 ms.
    """
    has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if not has_cuda and _has_accelerator():
        torch.manual_seed(seed)
        return
    if has_cuda:
        torch.cuda.manual_seed_all(seed)
    torch.default_generator.manual_seed(seed)


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore the global generators at the end of the `with` block."""
    numpy_state, random_state = np.random.get_state(), random.getstate()
    # reading the state of CUDA generators would initialize CUDA
    has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = range(torch.cuda.device_count()) if has_cuda else ()
    with script_seed.preserved(), torch.random.fork_rng(devices):
        try:
            yield
        finally:
            np.random.set_state(numpy_state)
            random.setstate(random_state)
