"""Trains the digits example and writes (seconds, version, loss on the test set) lines; worker 0
measures.

One worker is slowed on purpose: args OUTPUT SLOWDOWN_SECONDS EPOCHS.
"""

import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

import psworker
from psworker.examples import digits


def main(output: Path, slowdown: float, epochs: int) -> None:
    torch.manual_seed(0)
    with psworker.connect() as job, output.open("a") as file:
        training_set, (images, labels) = digits.load()
        model = digits.network()
        optimizer = job.optimizer(torch.optim.AdamW(model.parameters(), lr=2e-3), model)
        began = time.monotonic()
        for x, y in job.batches(training_set, 32, epochs=epochs):
            if job.rank == 1:
                time.sleep(slowdown)
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            if job.rank == 0 and job.stats.steps % 4 == 0:
                with torch.no_grad():
                    model.eval()
                    loss = F.cross_entropy(model(images), labels).item()
                    model.train()
                file.write(f"{time.monotonic() - began:.3f},{job.version},{loss:.5f}\n")


main(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
