"""Digits that arrive class after class: each pass goes through a replay buffer that has grown."""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

CLASSES_OF_A_TASK = 2


class ReplayBuffer(Dataset):
    def __init__(self):
        self.items = []

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]

    def add(self, items):
        """Spread new items among the old ones, so that neighbours have different classes."""
        mixed = self.items + items
        self.items = [mixed[(i * 7919) % len(mixed)] for i in range(len(mixed))]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--tasks", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(1)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    replay = ReplayBuffer()
    loader = DataLoader(replay, batch_size=args.batch_size)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for task in range(args.tasks):
        first = CLASSES_OF_A_TASK * task
        new = [
            (image, label)
            for image, label in zip(images[:600], labels[:600], strict=True)
            if first <= label < first + CLASSES_OF_A_TASK
        ]
        replay.add(new)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        print(f"task {task}: {len(replay)} samples")
    with torch.no_grad():
        loss = F.cross_entropy(model(images[600:]), labels[600:])
    print(f"final loss {loss.item():.10f}")


if __name__ == "__main__":
    main()
