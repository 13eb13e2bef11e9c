"""An accelerate loop: prepare, clipped gradients, a linear schedule, 20 steps."""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset

import psworker
from psworker.integrations.accelerate import Accelerator


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()
    torch.manual_seed(1)
    job = psworker.connect()
    accelerator = Accelerator(cpu=True, job=job, clip_norm=1.0)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    train_loader = DataLoader(TensorDataset(images[:640], labels[:640]), batch_size=args.batch_size)
    eval_loader = DataLoader(TensorDataset(images[1280:], labels[1280:]), batch_size=128)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = LinearLR(optimizer, 1.0, 0.1, total_iters=20)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    model.train()
    for x, y in train_loader:
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    model.eval()
    losses = []
    for x, y in eval_loader:
        with torch.no_grad():
            losses.append(
                accelerator.gather_for_metrics(F.cross_entropy(model(x), y, reduction="none"))
            )
    loss = torch.cat(losses).mean()
    print(f"final loss {loss.item():.10f}")


if __name__ == "__main__":
    main()
