"""Policy allreduce: workers that join late, are asked to leave, or fail."""

import threading
from collections.abc import Callable

import torch

from tests.support.cluster import Cluster
from tests.support.reducing import BARRIER, Net, Worker
from tests.support.workers import joined

Make = Callable[..., Cluster]


def test_a_worker_that_comes_later_resumes_its_schedule(cluster: Make) -> None:
    """It begins at the version of the weights that it gets, which no upload has."""
    servers = cluster(policy="allreduce")
    first = Worker(servers.address, 0)
    first.steps(3)
    job, model = joined(servers.address, 1), Net()
    waiting = threading.Thread(target=first.job.client.collective, args=(1, BARRIER, 0))
    waiting.start()
    adam = torch.optim.Adam(model.parameters(), lr=0.5)
    optimizer = job.optimizer(adam, model)
    scheduler = torch.optim.lr_scheduler.StepLR(adam, step_size=1, gamma=0.5)

    job.resume(scheduler)
    job.pull()

    assert (job.first_version, optimizer.first_count, scheduler.last_epoch) == (3, 3, 3)
    assert adam.param_groups[0]["lr"] == 0.5**4
    job.client.collective(1, BARRIER, 0)
    waiting.join()
    first.job.close()
    job.close()
