"""The seed of a job: the same on all workers, also on late ones and after a restart."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from psworker import Client, Job
from tests.support.cluster import Cluster
from tests.support.training_threads import simulated
from tests.support.workers import DEADLINE

Make = Callable[..., Cluster]

SIZE = 20


def script(own: int, stop_at: int = 99, **given: Any) -> Callable[[Job], tuple[int, list[int]]]:
    """Train for a pass with this seed plus the rank; return the job's seed and the samples."""

    def run(job: Job) -> tuple[int, list[int]]:
        torch.manual_seed(own + job.rank)
        model, seen = nn.Linear(1, 1), []
        optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model)
        for step, batch in enumerate(job.batches(torch.arange(SIZE), 2, **given)):
            model(batch[:, None].float()).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += batch.tolist()
            if step == stop_at:
                break
        return job.client.seed, seen

    return run


def worker(address: str, run: Callable[[Job], Any]) -> Any:
    """Run a script as a worker of the job's current training."""
    with Job(Client(address, connect_timeout=10.0, wait_timeout=DEADLINE)) as job:
        return run(job)


def test_all_workers_have_the_seed_of_the_first_one() -> None:
    runs = simulated(2, script(5))

    assert [seed for seed, _ in runs] == [5, 5]
    assert runs == simulated(2, script(5)) != simulated(2, script(6))
    assert sorted(x for _, seen in runs for x in seen) == list(range(SIZE))
    given = simulated(2, script(9, seed=5))
    assert [seen for _, seen in given] == [seen for _, seen in runs]


@pytest.mark.parametrize("durability", ["log", "snapshot"])
def test_a_resumed_job_keeps_its_seed(cluster: Make, tmp_path: Path, durability: str) -> None:
    settings = {"min_workers": 1, "data_dir": tmp_path, "durability": durability}
    servers = cluster(1, **settings)
    _, first = worker(servers.address, script(5, stop_at=3))
    servers.stop()

    seed, rest = worker(cluster(1, **settings).address, script(6))

    assert seed == 5
    ((_, complete),) = simulated(1, script(5))
    assert first + rest == complete


def test_a_late_worker_gets_the_seed_and_a_new_membership_keeps_it(cluster: Make) -> None:
    address = cluster(1, policy="async").address

    def first(job: Job) -> list[int]:
        seeds = [script(5, stop_at=1)(job)[0]]
        seeds.append(worker(address, script(6, stop_at=1))[0])
        job.client.rejoin()
        return [*seeds, job.client.seed]

    assert worker(address, first) == [5, 5, 5]
