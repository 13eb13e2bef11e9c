"""One of our workers: really trains a network. Args: SETUP ADDRESS RANK.

Words: "go", steps as a script makes them; "compute", the same without the optimizer; "transfer",
the optimizer alone.
"""

import hashlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import psworker
from benchmarks import product
from benchmarks.contenders.modules import OPTIMIZERS
from benchmarks.setup import Setup
from benchmarks.speaker import Measurements, serve
from pscommon.system.process_limits import tune_malloc
from psworker.job import Job
from psworker.session.step_stats import PHASES

LAYER_COUNT = 32
LEARNING_RATE = 1e-3


def network(nbytes: int) -> nn.Sequential:
    """Layers of equal size, of about `nbytes` in all."""
    torch.manual_seed(0)
    width = max(2, round((nbytes / 4 / LAYER_COUNT) ** 0.5))
    return nn.Sequential(
        *[part for _ in range(LAYER_COUNT) for part in (nn.Linear(width, width), nn.ReLU())]
    )


class Training:
    """A job, its network and an endless loop over data that is the same in every run."""

    def __init__(self, setup: Setup, job: Job) -> None:
        self._setup, self._job = setup, job
        self._model = network(setup.nbytes)
        optimizer = OPTIMIZERS[setup.optimizer](self._model.parameters(), lr=LEARNING_RATE)
        self._optimizer = job.optimizer(optimizer, self._model, overlap=setup.overlap)
        width = next(self._model.parameters()).shape[1]
        # one item of the data set is a whole batch: putting rows together is not what is measured
        data = torch.randn(4, setup.batch, width, generator=torch.Generator().manual_seed(1))
        self._batches: Iterator[Tensor] = iter(job.batches(data, 1, epochs=1 << 20, shuffle=False))
        self._fixed_batch = data[:1]

    def step(self) -> None:
        self._compute(next(self._batches))
        self._optimizer.step()
        self._optimizer.zero_grad()

    def steps(self) -> Measurements:
        """Seconds a step and their phases, without the first step of the turn, which has nothing
        to overlap with.

        digest: of the weights, once they are all here.
        """
        self.step()
        before, began = dict(self._job.stats.total), time.perf_counter()
        for _ in range(self._setup.pieces):
            self.step()
        count, seconds = self._setup.pieces, time.perf_counter() - began
        phases = {
            f"phase.{name}": (self._job.stats.total[name] - before[name]) / count for name in PHASES
        }
        return {"seconds": seconds / count, "count": count + 1, "digest": self._digest(), **phases}

    def compute(self) -> Measurements:
        """Seconds of a forward and backward pass."""
        return self._timed(lambda: self._compute(self._fixed_batch))

    def transfer(self) -> Measurements:
        """Seconds of a push and pull, nothing else."""
        self._compute(self._fixed_batch)
        return self._timed(self._optimizer.step)

    def _compute(self, inputs: Tensor) -> None:
        F.mse_loss(self._model(inputs), inputs).backward()  # type: ignore[no-untyped-call]

    def _timed(self, work: Any) -> Measurements:
        began = time.perf_counter()
        for _ in range(self._setup.pieces):
            work()
        return {
            "seconds": (time.perf_counter() - began) / self._setup.pieces,
            "count": self._setup.pieces,
        }

    def _digest(self) -> float:
        """48 bits of a hash: as many as a JSON number holds exactly."""
        self._job.wait()
        found = hashlib.sha256()
        for parameter in self._model.parameters():
            found.update(parameter.detach().numpy().data)
        return float(int.from_bytes(found.digest()[:6], "big"))


def main(setup: Setup, address: str, rank: int) -> None:
    tune_malloc()
    product.configure(setup)
    torch.set_num_threads(1)
    with psworker.connect(address, rank=rank, device="cpu") as job:
        training = Training(setup, job)
        works = {"go": training.steps, "compute": training.compute, "transfer": training.transfer}
        serve(works, 1)


if __name__ == "__main__":
    main(Setup.from_json(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
