"""A small training script with a loader."""

from typing import Any

import torch
from torch import nn

from psworker.client.client import Client
from psworker.job import Job


def train(address: str, lanes: Any, width: int, **choices: Any) -> None:
    """Make two steps over a loader.

    width: of the only layer. choices: arguments of `job.optimizer`.
    """
    data = torch.ones(4, width)
    with Job(Client(address, lanes=lanes)) as job:
        model = nn.Linear(width, width)
        optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, **choices)
        for batch in job.batches(data, batch_size=2, shuffle=False):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
