"""Digits with a few broken images: micro-batches whose loss is not finite are left out of the
accumulated gradient.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

MICRO_BATCH = 8
# These images are in micro-batches 5, 8, 39 and 42. Two workers that take turns, and leave these
# out, add up the same micro-batches for each step as one process does.
BROKEN = (43, 66, 315, 339)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(1)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    images[list(BROKEN)] = torch.nan
    labels = torch.tensor(digits.target)
    train_data = TensorDataset(images[:1280], labels[:1280])
    loader = DataLoader(train_data, batch_size=MICRO_BATCH)
    accumulate = args.batch_size // MICRO_BATCH
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(args.epochs):
        used = skipped = 0
        for x, y in loader:
            loss = F.cross_entropy(model(x), y) / accumulate
            if not torch.isfinite(loss):
                skipped += 1
                continue
            loss.backward()
            used += 1
            if used % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
        print(f"epoch {epoch}: {skipped} batches of {used + skipped} are broken")
    with torch.no_grad():
        loss = F.cross_entropy(model(images[1280:]), labels[1280:])
    print(f"final loss {loss.item():.10f}")


if __name__ == "__main__":
    main()
