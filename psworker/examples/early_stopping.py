"""A network that is evaluated after each pass, keeps its best weights, and stops early.

ps-run --servers 2 --workers 2 -m psworker.examples.early_stopping --save best.safetensors
PS_LOCAL=1 python -m psworker.examples.early_stopping         # the same training without servers
"""

# mypy: allow-untyped-calls

import argparse
import logging
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import psworker

log = logging.getLogger("early_stopping")

Pair = tuple[Tensor, Tensor]


def load(samples: int = 1200) -> tuple[Pair, Pair]:
    """Return training set and validation set: noisy points float32[n, 2] of three spirals and
    their labels int64[n].
    """
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (samples,), generator=generator)
    radius = torch.rand(samples, generator=generator)
    angle = 4 * radius + labels * (2 * math.pi / 3)
    noise = 0.05 * torch.randn(samples, 2, generator=generator)
    points = radius[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1) + noise
    split = samples // 4
    return (points[split:], labels[split:]), (points[:split], labels[:split])


def make_model() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)
    )


def evaluate(model: nn.Module, batches: Iterable[Sequence[Tensor]]) -> tuple[float, int]:
    """Return the mean loss over these batches, and the number of their samples."""
    total, samples = 0.0, 0
    model.eval()
    with torch.no_grad():
        for x, y in batches:
            total += F.cross_entropy(model(x), y, reduction="sum").item()
            samples += len(x)
    model.train()
    return total / max(1, samples), samples


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=60, help="at most")
    parser.add_argument("--patience", type=int, default=3, help="passes without a better loss")
    parser.add_argument("--batch-size", type=int, default=32, help="per worker")
    parser.add_argument("--one-evaluates", action="store_true", help="instead of all workers")
    parser.add_argument("--save", type=Path, help="file for the best weights")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    torch.manual_seed(0)
    with psworker.connect() as job:
        training_set, validation_set = load()
        model = make_model()
        optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01), model)
        train_loader = job.batches(training_set, args.batch_size)
        validation_loader = job.batches(validation_set, args.batch_size, shuffle=False)

        best, bad_passes = math.inf, 0
        for epoch in range(args.epochs):
            for x, y in train_loader:
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            # All workers get the same loss, so they stop after the same pass.
            if args.one_evaluates:
                loss = job.broadcast(evaluate(model, [validation_set])[0] if job.is_first else None)
            else:
                loss, samples = evaluate(model, validation_loader)  # this worker's share
                loss = job.all_reduce({"loss": loss}, samples=samples)["loss"]
            job.report(validation_loss=loss)
            bad_passes = 0 if loss < best else bad_passes + 1
            if loss < best:
                best = loss
                if args.save and job.is_first:
                    job.save(args.save)
                job.barrier()  # no worker trains on before the weights are saved
            log.info("pass %d: validation loss %.4f, best %.4f", epoch, loss, best)
            if bad_passes == args.patience:
                break
        job.report(best_validation_loss=best)


if __name__ == "__main__":
    main()
