"""Handwritten digits with a small convolutional network, one epoch loop, StepLR."""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import psworker


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(512, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(x), dim=1)


def train(model, loader, optimizer):
    model.train()
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()


def test(model, loader):
    model.eval()
    loss, count = 0.0, 0
    with torch.no_grad():
        for data, target in loader:
            loss += F.nll_loss(model(data), target, reduction="sum").item()
            count += len(target)
    return loss / count


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    job = psworker.connect()
    torch.manual_seed(1)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train_data = TensorDataset(images[:1280], labels[:1280])
    test_data = TensorDataset(images[1280:], labels[1280:])
    train_loader = job.batches(DataLoader(train_data, batch_size=args.batch_size))
    test_loader = DataLoader(test_data, batch_size=256)
    model = Net()
    optimizer = job.optimizer(torch.optim.Adadelta(model.parameters(), lr=1.0), model)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, args.epochs + 1):
        train(model, train_loader, optimizer)
        loss = test(model, test_loader)
        print(f"epoch {epoch} test loss {loss:.4f}")
        scheduler.step()
    print(f"final loss {loss:.10f}")


if __name__ == "__main__":
    main()
