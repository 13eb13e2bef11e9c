"""A generator against a discriminator on handwritten digits, with two steps for each batch."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader

import psworker


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    job = psworker.connect()
    torch.manual_seed(1)
    images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1)[:1536] / 8 - 1
    loader = job.batches(DataLoader(images, batch_size=args.batch_size))
    generator = nn.Sequential(
        nn.ConvTranspose2d(16, 32, 2),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 4, 2, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 1, 4, 2, 1),
        nn.Tanh(),
    )
    discriminator = nn.Sequential(
        nn.Conv2d(1, 16, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(16, 32, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(128, 1),
    )
    criterion = nn.BCEWithLogitsLoss()
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    optimizer_d = job.optimizer(optimizer_d, discriminator, name="d")
    optimizer_g = job.optimizer(optimizer_g, generator, name="g")
    for _ in range(args.epochs):
        for real in loader:
            noise = torch.randn(len(real), 16, 1, 1)
            fake = generator(noise)
            optimizer_d.zero_grad()
            real_loss = criterion(discriminator(real), torch.ones(len(real), 1))
            fake_loss = criterion(discriminator(fake.detach()), torch.zeros(len(real), 1))
            (real_loss + fake_loss).backward()
            optimizer_d.step()
            optimizer_g.zero_grad()
            criterion(discriminator(fake), torch.ones(len(real), 1)).backward()
            optimizer_g.step()
    with torch.no_grad():
        loss = criterion(discriminator(images[:256]), torch.ones(256, 1))
    print(f"final loss {loss.item():.10f}")


if __name__ == "__main__":
    main()
