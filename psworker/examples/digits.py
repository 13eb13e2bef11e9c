"""A convolutional network learns handwritten digits: 1797 images of 8x8 pixels of scikit-learn.

ps-run --servers 2 --workers 2 -m psworker.examples.digits
PS_LOCAL=1 python -m psworker.examples.digits                 # the same training without servers
"""

# mypy: allow-untyped-calls

import argparse
import logging
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import psworker

log = logging.getLogger("digits")

TEST_IMAGE_COUNT = 360


def load() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return training set and test set, with the same split in every run.

    Each is a pair: images float32[n, 1, 8, 8] in 0..1, and labels int64[n].
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit(
            "this example needs scikit-learn: pip install 'paramserver[examples]'"
        ) from None
    images, labels = load_digits(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(labels))
    x = torch.tensor(images[order] / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    y = torch.tensor(labels[order], dtype=torch.int64)
    return (x[TEST_IMAGE_COUNT:], y[TEST_IMAGE_COUNT:]), (
        x[:TEST_IMAGE_COUNT],
        y[:TEST_IMAGE_COUNT],
    )


def network() -> nn.Module:
    """Return a network of 39 thousand weights, with BatchNorm and dropout."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Dropout(0.25),
        nn.Linear(64, 10),
    )


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    return float((model(images).argmax(1) == labels).float().mean())


def train(
    job: psworker.Job,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Iterable[list[Tensor]],
) -> None:
    """Train for one epoch on this worker's share of the data."""
    model.train()
    for batch in loader:
        x, y = (tensor.to(job.device) for tensor in batch)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if job.stats.steps % 50 == 0:
            log.info("step %d, version %d: loss %.3f", job.stats.steps, job.version, loss.item())
            job.report(loss=loss.item())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="per worker")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    torch.manual_seed(args.seed)
    with psworker.connect() as job:
        training_set, (images, labels) = load()
        model = network().to(job.device)
        optimizer = job.optimizer(torch.optim.AdamW(model.parameters(), lr=args.lr), model)

        images, labels = images.to(job.device), labels.to(job.device)

        train_loader = job.batches(training_set, args.batch_size, seed=args.seed)
        for epoch in range(args.epochs):
            train(job, model, optimizer, train_loader)
            if not train_loader.skipped:  # otherwise an earlier run has completed the epoch
                log.info("epoch %d: test accuracy %.4f", epoch, accuracy(model, images, labels))

        correct = accuracy(model, images, labels)
        log.info("test accuracy %.4f after %d versions", correct, job.version)
        job.report(accuracy=correct)


if __name__ == "__main__":
    main()
