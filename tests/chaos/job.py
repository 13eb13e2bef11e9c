"""A worker's script for the soak test: `ps-worker ... -m tests.chaos.job --journal FOLDER counter`.

counter trains a small network, and two tensors that each update increases by one: they count the
updates on every shard. It loops over its data until FOLDER/stop exists. digits and charlm are the
examples with a journal; they end when the job is stopped.
"""

import argparse
import os
import sys
from itertools import count
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import psworker
from pscommon.settings.values import Lanes, seconds
from psworker import Job
from psworker.connection.discovery import discover
from psworker.transport.grpc_transport import GrpcTransport
from tests.chaos.client import COUNTER, JournaledClient, SequenceLane
from tests.chaos.journal import Journal
from tests.support.rpc_faults import Faults

SAMPLES, BATCH = 512, 8
STOP = "stop"
NO_FAULTS = "*=0:0%:0%"
LANES: tuple[Lanes, ...] = ("grpc", "stream", "shm")
"""Lanes of the workers, one after another; the seed decides which is first."""


class CountingModel(nn.Module):
    """A model with large counters first and last, so that both of two shards hold some."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter(f"{COUNTER}_first", nn.Parameter(torch.zeros(1024)))
        self.network = nn.Sequential(
            nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)
        )
        self.register_parameter(f"{COUNTER}_last", nn.Parameter(torch.zeros(1024)))

    def groups(self, lr: float) -> list[dict[str, object]]:
        """Return the parameter groups in the order of the buffer."""
        first, last = self.get_parameter(f"{COUNTER}_first"), self.get_parameter(f"{COUNTER}_last")
        return [
            {"params": [first], "lr": 1.0},
            {"params": list(self.network.parameters()), "lr": lr},
            {"params": [last], "lr": 1.0},
        ]

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return a loss whose gradient is -1 for each counter; with lr 1 an update adds 1."""
        counters = sum(
            value.sum() for name, value in self.named_parameters() if name.startswith(COUNTER)
        )
        return F.cross_entropy(self.network(x), y) - counters


def connect(folder: Path, rules: str, seed: int) -> Job:
    """Connect as psworker.connect does under ps-worker, with a journal."""
    rank, attempt = int(os.environ["PS_WORKER_RANK"]), int(os.environ.get("PS_WORKER_ATTEMPT", "0"))
    connect_timeout = seconds(os.environ.get("PS_CONNECT_TIMEOUT", "60"))
    journal = Journal(folder, f"w{rank}.{attempt}")
    cluster = discover(os.environ["PS_SERVERS"].split(","), connect_timeout)
    lanes = LANES[(rank + seed) % len(LANES)]
    lane = SequenceLane(
        GrpcTransport(cluster.addresses, lanes=lanes),
        Faults(rules, seed * 1000 + rank * 100 + attempt),
    )
    client = JournaledClient(journal, lane, rank=rank, connect_timeout=connect_timeout, lanes=lanes)
    return Job(client, rank, torch.device("cpu"))


def train(job: Job, folder: Path, epochs: int) -> None:
    """Train loops of `epochs` epochs until the stop file exists."""
    torch.manual_seed(0)
    model = CountingModel()
    data = torch.rand(SAMPLES, 8), torch.randint(0, 4, (SAMPLES,))
    optimizer = job.optimizer(torch.optim.SGD(model.groups(0.05)), model)
    for loop in count():
        if (folder / STOP).exists() or getattr(job, "stopping", False):
            return
        for x, y in job.batches(data, batch_size=BATCH, epochs=epochs, seed=loop):
            model.loss(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=4, help="of a loop")
    parser.add_argument(
        "--faults", default=NO_FAULTS, help="of calls, as tests/support/rpc_faults.py reads them"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("job", choices=["counter", "digits", "charlm"])
    args = parser.parse_args()
    if args.job == "counter":
        with connect(args.journal, args.faults, args.seed) as job:
            train(job, args.journal, args.epochs)
        return
    from psworker.examples import charlm, digits

    psworker.connect = lambda: connect(args.journal, args.faults, args.seed)  # type: ignore[assignment]
    sys.argv = [args.job, "--epochs", str(args.epochs)]
    {"digits": digits, "charlm": charlm}[args.job].main()


if __name__ == "__main__":
    main()
