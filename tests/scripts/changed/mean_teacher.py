"""Few labelled digits and many without labels: a student that agrees with its mean teacher."""

import argparse
import copy

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psworker

UNLABELLED = -1


class MeanTeacher(nn.Module):
    def __init__(self, decay=0.9):
        super().__init__()
        self.student = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.decay = decay

    def forward(self, x):
        """Return the student's logits, and the teacher's of shifted images."""
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                old.mul_(self.decay).add_(new, alpha=1 - self.decay)
            shifted = torch.roll(x.view(-1, 8, 8), 1, dims=2).flatten(1)
            target = self.teacher(shifted)
        return self.student(x), target


def loss_function(logits, target, y):
    labelled = F.cross_entropy(logits, y, ignore_index=UNLABELLED, reduction="sum") / len(y)
    return labelled + F.mse_loss(logits.softmax(1), target.softmax(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    job = psworker.connect()
    torch.manual_seed(1)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    train_labels = labels[:1280].clone()
    train_labels[torch.arange(1280) % 4 != 0] = UNLABELLED
    train_data = TensorDataset(images[:1280], train_labels)
    loader = job.batches(DataLoader(train_data, batch_size=args.batch_size))
    model = MeanTeacher()
    optimizer = torch.optim.Adam(model.student.parameters(), lr=5e-3)
    optimizer = job.optimizer(optimizer, model, buffers={"teacher.*": "first"})
    for _ in range(args.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss_function(*model(x), y).backward()
            optimizer.step()
    with torch.no_grad():
        loss = F.cross_entropy(model.teacher(images[1280:]), labels[1280:])
    print(f"final loss {loss.item():.10f}")


if __name__ == "__main__":
    main()
