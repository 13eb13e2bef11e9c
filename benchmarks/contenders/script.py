"""One of our workers: an ordinary training script. Args: SETUP ADDRESS RANK."""

import sys
import time
from itertools import islice

import torch

import psworker
from benchmarks import product
from benchmarks.contenders.exchange import WARM_UP_COUNT
from benchmarks.networks import dataset, differentiate, network
from benchmarks.setup import Setup
from benchmarks.speaker import Measurements, serve

EPOCH_COUNT = 1 << 20


def main(setup: Setup, address: str, rank: int) -> None:
    product.configure(setup)
    torch.set_num_threads(1)
    model, updates = network(setup.network), 0
    with psworker.connect(address, rank=rank, device="cpu") as job:
        adam = torch.optim.Adam(model.parameters(), lr=setup.rate)
        optimizer = job.optimizer(adam, model)
        batches = iter(job.batches(dataset(), setup.batch, epochs=EPOCH_COUNT))

        def turn() -> Measurements:
            nonlocal updates
            began = time.perf_counter()
            for batch in islice(batches, setup.pieces):
                differentiate(model, batch)
                optimizer.step()
                optimizer.zero_grad()
            seconds = (time.perf_counter() - began) / setup.pieces
            updates += setup.pieces
            if job.version != updates:
                raise RuntimeError(f"after {updates} steps the weights are version {job.version}")
            return {"seconds": seconds, "count": setup.pieces}

        serve({"go": turn}, WARM_UP_COUNT)


if __name__ == "__main__":
    main(Setup.from_json(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
