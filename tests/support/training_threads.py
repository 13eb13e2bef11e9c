"""Scripts of several concurrent workers, in a simulated cluster or as threads against real
servers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

from psserver.process.config import ServerConfig
from psworker import Client, Job
from psworker.simulation import DirectTransport, SimulatedCluster
from tests.support.workers import connected, together

T = TypeVar("T")

Script = Callable[[Job], T]
"""Function of one worker; job.rank is its rank."""


def simulated(workers: int, script: Script[T], **settings: Any) -> list[T]:
    """Run the script on simulated workers that take turns; return their results.

    settings: of ServerConfig.
    """
    config = ServerConfig(**{"min_workers": workers, "lease": 1e6, **settings})
    cluster = SimulatedCluster(config, workers)

    def run(rank: int) -> T:
        cluster.turns.enter(rank)
        try:
            with Job(
                Client(lane=DirectTransport(cluster, rank), rank=rank), rank, torch.device("cpu")
            ) as job:
                return script(job)
        finally:
            cluster.turns.leave(rank)

    return together(*[partial(run, rank) for rank in range(workers)])


def real(address: str, workers: int, script: Script[T]) -> list[T]:
    """Run the script on concurrent workers over gRPC; return their results."""

    def run(rank: int) -> T:
        with Job(connected(address, rank), rank, torch.device("cpu")) as job:
            return script(job)

    return together(*[partial(run, rank) for rank in range(workers)])
