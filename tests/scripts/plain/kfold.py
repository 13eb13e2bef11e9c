"""Four-fold cross-validation on handwritten digits: each fold trains a network of its own."""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

FOLDS = 4


def fit(model, loader, optimizer, epochs):
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    digits = load_digits()
    images = torch.tensor(digits.data[:640], dtype=torch.float32) / 16
    data = TensorDataset(images, torch.tensor(digits.target[:640]))
    losses = []
    for fold in range(FOLDS):
        torch.manual_seed(fold)
        training = Subset(data, [i for i in range(len(data)) if i % FOLDS != fold])
        x, y = data[fold::FOLDS]
        loader = DataLoader(training, batch_size=args.batch_size)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        fit(model, loader, optimizer, args.epochs)
        with torch.no_grad():
            losses.append(F.cross_entropy(model(x), y).item())
        print(f"fold {fold} loss {losses[-1]:.4f}")
    print(f"final loss {sum(losses) / FOLDS:.10f}")


if __name__ == "__main__":
    main()
