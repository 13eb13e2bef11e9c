"""torchvision's ResNet-18 learns the colours of generated noisy images.

ps-run --servers 2 --workers 2 -m psworker.examples.resnet
PS_LOCAL=1 python -m psworker.examples.resnet                 # the same training without servers

Needs torchvision: pip install 'paramserver[vision]'
"""

# mypy: allow-untyped-calls

import argparse
import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import psworker

log = logging.getLogger("resnet")

CLASS_COUNT = 4
TEST_IMAGE_COUNT = 128


def resnet18() -> nn.Module:
    """Return the untrained network with CLASS_COUNT outputs."""
    try:
        from torchvision.models import resnet18
    except ImportError:
        raise SystemExit(
            "this example needs torchvision: pip install 'paramserver[vision]'"
        ) from None
    network: nn.Module = resnet18(num_classes=CLASS_COUNT)
    return network


def images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return noise float32[count, 3, 32, 32], tinted by its labels, and the labels int64[count]."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASS_COUNT, (count,), generator=generator)
    x = torch.randn(count, 3, 32, 32, generator=generator)
    x[:, 0] += 0.5 * (labels // 2 * 2 - 1).view(-1, 1, 1)
    x[:, 1] += 0.5 * (labels % 2 * 2 - 1).view(-1, 1, 1)
    return x, labels


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.SGD:
    """Return SGD with two parameter groups: no weight decay for biases and normalization."""
    decayed: list[Any] = [p for p in model.parameters() if p.ndim > 1]
    others: list[Any] = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 5e-4}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.SGD(groups, lr=lr, momentum=0.9, nesterov=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32, help="per worker")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(args.seed)

    with psworker.connect() as job:
        model = resnet18().to(job.device)
        optimizer = job.optimizer(make_optimizer(model, args.lr), model)
        training_set = TensorDataset(*images(args.images, seed=1))
        test_x, test_y = (tensor.to(job.device) for tensor in images(TEST_IMAGE_COUNT, seed=2))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

        loader = job.batches(training_set, args.batch_size, drop_last=True, seed=args.seed)
        for epoch in range(args.epochs):
            model.train()
            for x, y in loader:
                loss = F.cross_entropy(model(x.to(job.device)), y.to(job.device))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                job.report(loss=loss)
            scheduler.step()
            if not loader.skipped:  # otherwise an earlier run has completed the epoch
                model.eval()
                with torch.no_grad():
                    accuracy = float((model(test_x).argmax(1) == test_y).float().mean())
                log.info("epoch %d: test accuracy %.4f", epoch, accuracy)
                job.report(accuracy=accuracy)


if __name__ == "__main__":
    main()
