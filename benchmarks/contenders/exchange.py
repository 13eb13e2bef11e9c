"""One of our workers: pushes a tape of gradients and pulls the new weights. Args: SETUP ADDRESS
RANK.
"""

import sys
import time

import numpy as np
from numpy.typing import NDArray

from benchmarks import product
from benchmarks.setup import Setup
from benchmarks.speaker import Measurements, serve
from pscommon.core.partition import PartitionPlan
from pscommon.system.process_limits import tune_malloc

WARM_UP_COUNT = 3


class Worker:
    """Gradients are 1 everywhere, so what the weights have to be after a number of updates is
    known.
    """

    def __init__(self, setup: Setup, address: str, rank: int) -> None:
        self._setup = setup
        self.client = product.client(address, rank, setup)
        plan = self.client.model.agree(product.spec(setup))
        self._gradients, self._weights = self.client.model.flat_buffers()
        self.client.model.start(self._weights)
        np.frombuffer(self._gradients, np.float32)[:] = 1
        self._ends = ends(plan)

    def turn(self) -> Measurements:
        """Seconds of one exchange, and of its phases."""
        began = time.perf_counter()
        for _ in range(self._setup.pieces):
            result = self.client.model.exchange(gradients=self._gradients, weights=self._weights)
        seconds = (time.perf_counter() - began) / self._setup.pieces
        self._check(result.version)
        phases = {f"phase.{name}": value for name, value in result.seconds.items()}
        return {"seconds": seconds, "count": self._setup.pieces, **phases}

    def pull(self) -> float:
        """Seconds of a pull alone."""
        began = time.perf_counter()
        self.client.model.exchange(gradients=None, weights=self._weights)
        return time.perf_counter() - began

    def push(self) -> None:
        self.client.model.exchange(gradients=self._gradients, weights=None)

    def _check(self, version: int) -> None:
        """A contender that does not do the work is out."""
        found = np.frombuffer(self._weights, np.float32)[self._ends]
        check_weights(found, self._setup, version)


def ends(plan: PartitionPlan) -> NDArray[np.int64]:
    """Places of the first and the last number of every tensor on the tape, all float32."""
    extents = [plan.extent(index) for index in range(len(plan.spec.tensors))]
    return np.array([[extent.start, extent.stop - 4] for extent in extents]).ravel() // 4


def check_weights(found: NDArray[np.float32], setup: Setup, updates: int) -> None:
    """Check weights that start at 0 after `updates` updates with gradients of 1.

    Raises:
        RuntimeError: the weights differ.
    """
    expected = -setup.rate * updates
    if not np.allclose(found, expected, rtol=1e-2):
        raise RuntimeError(
            f"after {updates} updates weights are {found.min()} to {found.max()}, not {expected}"
        )


def main(setup: Setup, address: str, rank: int) -> None:
    tune_malloc()
    worker = Worker(setup, address, rank)
    with worker.client:
        serve({"go": worker.turn}, WARM_UP_COUNT)


if __name__ == "__main__":
    main(Setup.from_json(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
