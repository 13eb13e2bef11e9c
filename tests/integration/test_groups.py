"""Groups and servers: a group is one worker of the job."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from pscommon.core.errors import InvalidRequestError, MismatchError
from psworker import Job
from psworker.connection.membership import report_loss
from tests.support.cluster import Cluster
from tests.support.groups import as_group
from tests.support.policies import POLICIES
from tests.support.workers import connected, status, together, until

ROWS, BATCH, EPOCHS = 240, 12, 4


def data() -> tuple[Tensor, Tensor]:
    rows = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(5))
    return rows, rows.sum(1, keepdim=True)


def network(has_statistics: bool) -> nn.Module:
    # no bias before the normalization: its gradient is nothing but rounding
    middle: list[nn.Module] = [nn.BatchNorm1d(6)] if has_statistics else []
    model = nn.Sequential(nn.Linear(5, 6, bias=False), *middle, nn.Tanh(), nn.Linear(6, 1))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter) + number)
    return model


def train(
    job: Job, rank: int, *, batch_size: int, adam: bool = False, has_statistics: bool = True
) -> dict[str, Tensor]:
    model = network(has_statistics)
    make: Any = torch.optim.Adam if adam else torch.optim.SGD
    optimizer = job.optimizer(make(model.parameters(), lr=0.01), model)
    for x, y in job.batches(data(), batch_size=batch_size, epochs=EPOCHS, seed=1):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def group(
    address: str, number: int, size: int, script: Callable[[Job, int], Any], **options: Any
) -> Any:
    return as_group(size, lambda: connected(address, number, **options), script, timeout=60)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=tolerance * float(value.abs().max())
        )


def trained(
    cluster: Callable[..., Cluster], workers: int, size: int, **options: Any
) -> dict[str, Tensor]:
    """Return the weights after training with these numbers of workers and ranks of each."""
    made = cluster(2, min_workers=workers)
    script = partial(train, **options)
    groups = [partial(group, made.address, number, size, script) for number in range(workers)]
    found = [weights for ranks in together(*groups) for weights in ranks]
    for weights in found[1:]:
        assert_equal(weights, found[0], 0)
    return found[0]


@pytest.mark.parametrize("adam", [False, True], ids=["sgd", "adam"])
def test_two_groups_equal_four_workers(cluster: Callable[..., Cluster], adam: bool) -> None:
    """The statistics of BatchNorm are those of four workers, too."""
    expected = trained(cluster, 4, 1, batch_size=BATCH, adam=adam)
    found = trained(cluster, 2, 2, batch_size=BATCH, adam=adam)

    assert_equal(found, expected, 1e-5 if adam else 1e-6)


@pytest.mark.full
@pytest.mark.parametrize("adam", [False, True], ids=["sgd", "adam"])
def test_groups_equal_workers_with_their_whole_batch(
    cluster: Callable[..., Cluster], adam: bool
) -> None:
    options = {"adam": adam, "has_statistics": False}
    expected = trained(cluster, 2, 1, batch_size=2 * BATCH, **options)
    found = trained(cluster, 2, 2, batch_size=BATCH, **options)
    again = trained(cluster, 2, 2, batch_size=BATCH, **options)

    assert_equal(found, expected, 1e-5 if adam else 1e-6)
    assert_equal(again, found, 0)


@pytest.mark.parametrize("lanes", ["grpc", "stream", "shm"])
def test_a_group_uses_every_lane(cluster: Callable[..., Cluster], lanes: str) -> None:
    made = cluster(2)
    script = partial(train, batch_size=BATCH)
    first, second = group(made.address, 0, 2, script, lanes=lanes)

    assert_equal(second, first, 0)
    assert status(made.address)["samples"] == ROWS * EPOCHS


@pytest.mark.full
@pytest.mark.parametrize("name", POLICIES)
def test_all_policies_train_groups(cluster: Callable[..., Cluster], name: str) -> None:
    made = cluster(1, min_workers=2, **POLICIES[name])
    script = partial(train, batch_size=BATCH)
    together(*(partial(group, made.address, number, 2, script) for number in range(2)))

    assert status(made.address)["samples"] == ROWS * EPOCHS


def test_global_batches_are_added_up_on_each_rank(cluster: Callable[..., Cluster]) -> None:
    """One update per 24 samples: two batches of 12, or four of 6."""
    found = [
        group(
            cluster(1, global_batch=24).address,
            0,
            size,
            partial(train, batch_size=batch_size, has_statistics=False),
        )
        for size, batch_size in ((1, 12), (2, 6))
    ]

    assert_equal(found[1][0], found[0][0], 1e-6)


def test_a_lost_group_whose_ranks_live_rejoins(cluster: Callable[..., Cluster]) -> None:
    """The coordinator drops the worker; all ranks come back as a new one, and no batch is lost."""
    check_rejoin(cluster(1), is_spread=False)


@pytest.mark.full
def test_a_lost_group_with_a_pipeline_rejoins(cluster: Callable[..., Cluster]) -> None:
    check_rejoin(cluster(1), is_spread=True)


def check_rejoin(made: Cluster, is_spread: bool) -> None:
    def script(job: Job, rank: int) -> tuple[int, bool]:
        model = network(False)
        target: Any = model
        if is_spread:
            model = nn.Sequential(nn.Linear(5, 1))
            model.register_module(str(rank), model.pop(0))
            target = SimpleNamespace(submod=model, stage_index=rank, group_size=2)
        optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), target)
        for number, (x, y) in enumerate(job.batches(data(), batch_size=BATCH, seed=1)):
            if number == 3 and rank == 0:
                report_loss(job.client._inner.loss_ticket, "a test")
                until(lambda: status(made.address)["workers"][0]["state"] != "active", "evicted")
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return job.client.worker, job.version >= ROWS // BATCH // 2

    assert group(made.address, 0, 2, script) == [(2, True)] * 2
    assert status(made.address)["samples"] == ROWS


@pytest.mark.parametrize("lanes", ["grpc", "stream", "shm"])
def test_a_pipeline_trains_beside_a_single_worker(
    cluster: Callable[..., Cluster], lanes: str, tmp_path: Path
) -> None:
    """Both have all rows of their batches, and the servers have the names of the whole model."""

    class Layers(nn.Module):
        def __init__(self, *names: str) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({name: nn.Linear(5, 1) for name in names})
            self.counts = nn.BatchNorm1d(5) if "first" in names else nn.Identity()
            for parameter in self.layers.parameters():
                nn.init.constant_(parameter, 0.5)

        def losses(self, x: Tensor, y: Tensor) -> Tensor:
            found = [nn.functional.mse_loss(layer(x), y) for layer in self.layers.values()]
            return torch.stack([*found, self.counts(x).square().mean()]).sum()

    def script(job: Job, rank: int, *names: str) -> Layers:
        model = Layers(*names)
        stage = SimpleNamespace(submod=model, stage_index=rank, group_size=2)
        target: Any = model if len(names) > 1 else stage
        optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01), target)
        for x, y in job.batches(data(), batch_size=BATCH, seed=1):
            optimizer.zero_grad()
            model.losses(x, y).backward()
            optimizer.step()
        return model

    def stages(address: str, number: int) -> Iterator[Layers]:
        names = ("first", "second")
        yield from group(address, number, 2, lambda j, r: script(j, r, names[r]), lanes=lanes)

    def alone(address: str, number: int) -> Iterator[Layers]:
        with Job(connected(address, number, lanes=lanes)) as job:
            yield script(job, 0, "first", "second")
            if not number:
                job.save(tmp_path / "end.safetensors")

    made, other = (cluster(2, min_workers=2) for _ in range(2))
    (single,), parts = together(
        lambda: list(alone(made.address, 0)), lambda: list(stages(made.address, 1))
    )
    (expected,), _ = together(*(partial(list, alone(other.address, n)) for n in range(2)))

    found = single.state_dict()
    assert {name for each in parts for name in each.state_dict()} == found.keys()
    for each in parts:
        assert_equal(each.state_dict(), {n: found[n] for n in each.state_dict()}, 0)
    assert_equal(found, expected.state_dict(), 0)
    assert load_file(tmp_path / "end.safetensors").keys() == found.keys()


def test_workers_with_another_number_of_ranks_are_refused(
    cluster: Callable[..., Cluster],
) -> None:
    """The batches of a pass have one size."""
    made = cluster(1, policy="async", min_workers=2)
    script = partial(train, batch_size=BATCH)

    with pytest.raises(MismatchError, match="batch") as caught:
        together(
            partial(group, made.address, 0, 1, script), partial(group, made.address, 1, 2, script)
        )
    assert caught.value.reason == "LOOP_MISMATCH"


def test_any_rank_saves_the_job(cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    made = cluster(1)

    def script(job: Job, rank: int) -> None:
        train(job, rank, batch_size=BATCH)
        for number in range(2):  # one after another: the ranks are one process here
            if rank == number:
                job.save(tmp_path / f"{rank}.safetensors")
            job.barrier()

    group(made.address, 0, 2, script)
    first, second = (load_file(tmp_path / f"{rank}.safetensors") for rank in range(2))
    assert_equal(second, first, 0)


def test_policy_allreduce_refuses_groups(cluster: Callable[..., Cluster]) -> None:
    made = cluster(policy="allreduce")

    with pytest.raises(InvalidRequestError, match="excludes groups"):
        group(made.address, 0, 2, partial(train, batch_size=BATCH))
