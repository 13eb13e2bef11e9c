"""The global generators of torch, numpy and random: set for each batch, or kept as they are."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def reseed(*entropy: int) -> None:
    """Sets the global generators of torch, numpy and random, as a pure function of numbers that
    are not negative.
    """
    words = np.random.SeedSequence(entropy).generate_state(4)
    torch.manual_seed(int(words[0]) << 32 | int(words[1]))
    np.random.seed(words)
    random.seed(int(words[2]) << 32 | int(words[3]))


@contextmanager
def generators_kept() -> Iterator[None]:
    """What `reseed` does within is undone: torch, numpy and random go on where they were."""
    of_numpy, of_random = np.random.get_state(), random.getstate()
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # a look at their state would begin to use them
    with torch.random.fork_rng(range(torch.cuda.device_count()) if in_use else ()):
        try:
            yield
        finally:
            np.random.set_state(of_numpy)
            random.setstate(of_random)
