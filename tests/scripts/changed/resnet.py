"""A residual network with batch normalisation on synthetic images, SGD with momentum,
PolynomialLR.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psworker


class BasicBlock(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + self.shortcut(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    job = psworker.connect()
    torch.manual_seed(1)
    labels = torch.randint(0, 4, (1152,))
    images = torch.randn(1152, 3, 16, 16)
    images[:, 0, :, :] += (labels.float() - 1.5).view(-1, 1, 1) * 0.5
    images[:, 1, :8, :] += (labels % 2).float().view(-1, 1, 1) * 0.5
    train_data = TensorDataset(images[:1024], labels[:1024])
    loader = DataLoader(train_data, batch_size=args.batch_size, shuffle=True, drop_last=True)
    loader = job.batches(loader)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 1, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        BasicBlock(8, 16, 2),
        BasicBlock(16, 32, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 4),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    optimizer = job.optimizer(optimizer, model)
    steps = len(loader) * args.epochs
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, steps)
    for _ in range(args.epochs):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
    model.eval()
    with torch.no_grad():
        loss = F.cross_entropy(model(images[1024:]), labels[1024:])
    print(f"final loss {loss.item():.10f}")


if __name__ == "__main__":
    main()
