"""Servers with --exit-when-done end with the training, also if some worker had nothing to do."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from psworker import Job
from tests.support.cluster import Cluster
from tests.support.workers import VERSIONS, connected, status, together, train, training, until

Make = Callable[..., Cluster]
LIMIT = 30.0


@pytest.mark.parametrize("durability", ["snapshot", "log"])
def test_servers_of_a_finished_job_end_again_after_a_restart(
    cluster: Make, tmp_path: Path, durability: str
) -> None:
    """All scripts pass their completed loops without a step."""
    for _ in range(2):
        servers = cluster(
            2, min_workers=2, data_dir=tmp_path, durability=durability, exit_when_done=True
        )
        train(servers.address)
        assert servers.servers[0].ended.wait(LIMIT)
        servers.close()

    again = cluster(2, data_dir=tmp_path, durability=durability)
    assert status(again.address)["version"] == VERSIONS


@pytest.mark.full
def test_workers_of_an_earlier_run_do_not_end_restarted_servers(
    cluster: Make, tmp_path: Path
) -> None:
    """The log still knows them, while the new workers may be on their way."""
    settings = {"min_workers": 2, "data_dir": tmp_path, "durability": "log", "exit_when_done": True}
    servers = cluster(2, **settings)
    train(servers.address)
    assert servers.servers[0].ended.wait(LIMIT)
    servers.close()

    again = cluster(2, **settings)

    def comes_late() -> int:
        until(
            lambda: "idle" in [row["phase"] for row in status(again.address)["workers"]],
            "a wait for the second",
        )
        assert not again.servers[0].ended.wait(0.5)
        return training(again.address, 1)

    assert not again.servers[0].ended.wait(0.5)
    assert together(lambda: training(again.address, 0), comes_late) == [VERSIONS, VERSIONS]
    assert again.servers[0].ended.wait(LIMIT)


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_servers_end_when_only_one_worker_gets_data(cluster: Make, policy: str) -> None:
    servers = cluster(1, min_workers=2, policy=policy, exit_when_done=True)

    def work(rank: int) -> int:
        model, steps = nn.Linear(2, 1), 0
        with Job(connected(servers.address, rank), rank) as job:
            optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
            for (x,) in job.batches(TensorDataset(torch.ones(8, 2)), batch_size=8, epochs=1):
                model(x).sum().backward()
                optimizer.step()
                steps += 1
        return steps

    assert sorted(together(lambda: work(0), lambda: work(1))) == [0, 1]
    assert servers.servers[0].ended.wait(LIMIT)


def test_a_worker_that_only_registers_does_not_end_the_job(cluster: Make) -> None:
    """It leaves without having learned that no work is left."""
    servers = cluster(1, exit_when_done=True)
    with Job(connected(servers.address, 0), 0) as job:
        model = nn.Linear(2, 1)
        job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

    assert not servers.servers[0].ended.wait(1.0)
