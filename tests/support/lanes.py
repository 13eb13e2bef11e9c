"""The contract of the transports: tests that run over each of them (`pytest -m lanes`)."""

from collections.abc import Callable
from typing import TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., object])


def each_lane(test: Test) -> Test:
    """Run the test with each transport as its argument `lanes`."""
    return _with_lanes(test, "grpc", "stream", "shm")


def each_network_lane(test: Test) -> Test:
    """Run the test with each transport that sends tensors over a network, as `lanes`."""
    return _with_lanes(test, "grpc", "stream")


def _with_lanes(test: Test, *lanes: str) -> Test:
    return pytest.mark.lanes(pytest.mark.parametrize("lanes", lanes)(test))
