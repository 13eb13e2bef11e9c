"""One of our workers: `optimizer.step()` of a torch script whose gradients are there. Args:
SETUP ADDRESS RANK.
"""

import sys
import time
from itertools import islice, repeat

import numpy as np
import torch
from torch import nn

import psworker
from benchmarks import product
from benchmarks.contenders.exchange import WARM_UP_COUNT, check_weights
from benchmarks.setup import Setup
from benchmarks.shapes import shapes
from benchmarks.speaker import Measurements, serve
from pscommon.system.process_limits import tune_malloc

SAMPLE_COUNT, EPOCH_COUNT = 1000, 1 << 20
OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}


def module(setup: Setup) -> nn.Module:
    """A model that only holds its parameters, all 0, with gradients of 1."""
    made = nn.Module()
    for name, shape in shapes(setup.model, setup.nbytes).items():
        parameter = nn.Parameter(torch.zeros(shape))
        parameter.grad = torch.ones(shape)
        made.register_parameter(name, parameter)
    return made


def main(setup: Setup, address: str, rank: int, with_data: bool = False) -> None:
    """with_data: Each step takes a batch of the job's data, of one sample."""
    tune_malloc()
    product.configure(setup)
    torch.set_num_threads(1)
    model = module(setup)
    with psworker.connect(address, rank=rank, device="cpu") as job:
        optimizer = job.optimizer(
            OPTIMIZERS[setup.optimizer](model.parameters(), lr=setup.rate), model
        )

        batches = (
            iter(job.batches(torch.zeros(SAMPLE_COUNT, 1), 1, epochs=EPOCH_COUNT))
            if with_data
            else repeat(None)
        )

        def turn() -> Measurements:
            began = time.perf_counter()
            for _ in islice(batches, setup.pieces):
                optimizer.step()
            seconds = (time.perf_counter() - began) / setup.pieces
            last = [parameter.detach().flatten()[-1].item() for parameter in model.parameters()]
            check_weights(np.array(last, np.float32), setup, job.version)
            return {"seconds": seconds, "count": setup.pieces}

        serve({"go": turn}, WARM_UP_COUNT)


if __name__ == "__main__":
    main(Setup.from_json(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
