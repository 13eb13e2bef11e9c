"""A variational autoencoder on handwritten digits; the latent noise is drawn in the model."""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader

import psworker


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 48)
        self.mean = nn.Linear(48, 8)
        self.log_variance = nn.Linear(48, 8)
        self.fc3 = nn.Linear(8, 48)
        self.fc4 = nn.Linear(48, 64)

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        h = F.relu(self.fc1(x))
        mean, log_variance = self.mean(h), self.log_variance(h)
        z = mean
        if self.training:
            z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return self.decode(z), mean, log_variance


def loss_function(reconstruction, x, mean, log_variance):
    likelihood = F.binary_cross_entropy(reconstruction, x, reduction="sum")
    divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
    return (likelihood + divergence) / len(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    job = psworker.connect()
    torch.manual_seed(1)
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    train_loader = job.batches(DataLoader(images[:1408], batch_size=args.batch_size, shuffle=True))
    model = VAE()
    optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=1e-3), model)
    for _ in range(args.epochs):
        model.train()
        for x in train_loader:
            optimizer.zero_grad()
            loss = loss_function(*_reorder(x, model(x)))
            loss.backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        x = images[1408:]
        loss = loss_function(*_reorder(x, model(x)))
    print(f"final loss {loss.item():.10f}")


def _reorder(x, output):
    reconstruction, mean, log_variance = output
    return reconstruction, x, mean, log_variance


if __name__ == "__main__":
    main()
