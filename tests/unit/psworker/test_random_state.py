"""Seeds of the global random generators."""

import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from psworker.data import random_state
from psworker.data.random_state import preserved_generators, reseed

MAX_CALLS_COUNT = 50


@pytest.mark.parametrize("has_accelerator", [False, True])
def test_torch_gets_the_seed_that_manual_seed_would_set(
    monkeypatch: pytest.MonkeyPatch, has_accelerator: bool
) -> None:
    monkeypatch.setattr(random_state, "_has_accelerator", lambda: has_accelerator)
    with preserved_generators():
        reseed(1, 2, 3)
        words = np.random.SeedSequence((1, 2, 3)).generate_state(4)
        found, numbers = torch.get_rng_state(), (np.random.random(), random.random())

        torch.manual_seed(int(words[0]) << 32 | int(words[1]))
        assert torch.equal(torch.get_rng_state(), found)
        reseed(1, 2, 3)
        assert (np.random.random(), random.random()) == numbers
        reseed(1, 2, 4)
        assert not torch.equal(torch.get_rng_state(), found)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="torch.manual_seed is used")
def test_a_seed_takes_few_calls() -> None:
    """There are two for each batch. torch.manual_seed makes about 1500 for its stack traces."""
    with preserved_generators():
        reseed(1)
        assert (
            calls_of(lambda: reseed(2)) <= MAX_CALLS_COUNT < calls_of(lambda: torch.manual_seed(2))
        )


def calls_of(action: Callable[[], Any]) -> int:
    """Return the number of Python functions that an action calls."""
    count = 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count
