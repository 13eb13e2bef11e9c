"""What a worker that leaves could not send of its last changes is logged, and nothing else."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from psworker import Job
from psworker.client.client import Client
from psworker.session import drain
from tests.support.events import records_of
from tests.support.fake_server import FakeCluster


class Net(nn.Module):
    """A weight, and a buffer without an average."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.tensor(0))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    monkeypatch.setattr(drain, "MAX_WAIT_SECONDS", 0.1)
    with FakeCluster() as cluster:
        cluster.policy = "ssp"
        cluster.deal(0, 1)
        yield cluster


def leave_after_a_step(cluster: FakeCluster, changes: bool, pipeline: bool) -> None:
    """Leave the loop while the servers let each push wait."""
    model = Net()
    with Job(Client(cluster.addresses, connect_timeout=20.0, wait_timeout=20.0)) as job:
        sgd = torch.optim.SGD(model.parameters(), lr=0.5)
        optimizer = job.optimizer(sgd, model, pipeline=pipeline)
        for (x,) in job.batches((torch.ones(8, 1),), 1):
            cluster.waits_for = "worker 9" if pipeline else ""
            (model.weight * x).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            model.count += changes
            cluster.waits_for = "worker 9"
            drain.ask_all()
            break
    assert cluster.left[1] == "drained"


def test_a_push_under_way_is_no_lost_change(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    leave_after_a_step(cluster, changes=False, pipeline=True)

    assert records_of(caplog, "last_changes_not_stored") == []


def test_a_changed_buffer_that_is_not_stored_is_logged(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    leave_after_a_step(cluster, changes=True, pipeline=False)

    assert len(records_of(caplog, "last_changes_not_stored")) == 1
