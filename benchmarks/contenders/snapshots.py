"""Contender: steps and pulls of one worker, words "quiet" and "saving": while a snapshot is
written. Args: SETUP.

SETUP's pieces are steps a turn; each is followed by a pull alone.
"""

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

from benchmarks import product
from benchmarks.contenders.exchange import Worker
from benchmarks.sample import sample
from benchmarks.setup import Setup
from benchmarks.speaker import Measurements, serve
from pscommon.system.process_limits import tune_malloc


class Snapshots:
    """The worker, and its turns."""

    def __init__(self, setup: Setup, address: str) -> None:
        self._setup, self._address = setup, address
        self.worker = Worker(replace(setup, pieces=1), address, 0)

    def quiet(self) -> Measurements:
        steps, pulls = self._work(lambda done: done < self._setup.pieces)
        return {
            "seconds": median(steps),
            "longest": max(steps),
            "p99": sample(pulls).quantile(0.99),
            "count": len(steps),
        }

    def saving(self) -> Measurements:
        """At least as many steps, and on until the snapshot is on the disk."""
        usual = self.quiet()
        saving = threading.Thread(target=product.save, args=(self._address,))
        saving.start()
        steps, pulls = self._work(lambda done: done < self._setup.pieces or saving.is_alive())
        saving.join()
        return {
            "seconds": median(steps),
            "p99": sample(pulls).quantile(0.99),
            "pause": max(0.0, max(steps) - usual["longest"]),
            "lost": max(0.0, sum(steps) - len(steps) * usual["seconds"]),
            "count": len(steps),
        }

    def _work(self, more: Callable[[int], bool]) -> tuple[list[float], list[float]]:
        """Seconds of each step, and of the pull alone after it."""
        steps: list[float] = []
        pulls: list[float] = []
        while more(len(steps)):
            began = time.perf_counter()
            self.worker.turn()
            steps.append(time.perf_counter() - began)
            pulls.append(self.worker.pull())
        return steps, pulls


def main(setup: Setup) -> None:
    tune_malloc()
    with product.servers(setup) as address:
        snapshots = Snapshots(setup, address)
        with snapshots.worker.client:
            serve({"quiet": snapshots.quiet, "saving": snapshots.saving})


if __name__ == "__main__":
    main(Setup.from_json(sys.argv[1]))
