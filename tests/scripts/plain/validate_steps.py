"""Noisy sine waves, told apart by frequency; validation every ten steps of the whole training."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

VALIDATE_EVERY = 10


def make_data(samples):
    labels = torch.arange(samples) % 5
    time = torch.linspace(0, 6.28, 32)
    phase = torch.rand(samples, 1)
    waves = torch.sin((labels + 1).unsqueeze(1) * time + phase)
    return TensorDataset(waves + 2.0 * torch.randn(samples, 32), labels)


@torch.no_grad()
def evaluate(model, loader):
    total, samples = 0.0, 0
    model.eval()
    for x, y in loader:
        total += F.cross_entropy(model(x), y, reduction="sum").item()
        samples += len(y)
    model.train()
    return total / max(1, samples), samples


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(1)
    train_loader = DataLoader(make_data(1000), batch_size=args.batch_size)
    validation_loader = DataLoader(make_data(150), batch_size=50)
    test_loader = DataLoader(make_data(300), batch_size=100)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = 0
    for _ in range(args.epochs):
        for x, y in train_loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            step += 1
            if step % VALIDATE_EVERY == 0:
                loss, samples = evaluate(model, validation_loader)
                print(f"step {step} loss {loss:.4f} of {samples} samples")
    loss, _ = evaluate(model, test_loader)
    print(f"final loss {loss:.10f}")


if __name__ == "__main__":
    main()
