"""A job is a sequence of trainings, each with its own model, passes and collective results."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pscommon.core.errors import InvalidRequestError, TrainingOver, WaitTimeoutError
from psserver.core.job.snapshot_schedule import SnapshotInterval
from psserver.core.job.trainings import Trainings
from psworker import Job
from tests.support.cluster import Cluster
from tests.support.events import records_of
from tests.support.lanes import each_lane
from tests.support.standbys import RunningStandby, has_same_state, standby_state
from tests.support.workers import connected, status, together, until

Make = Callable[..., Cluster]


def data(fold: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(24, 3, generator=generator)
    return torch.cat([rows[: 8 * fold], rows[8 * (fold + 1) :]])


def model_of(fold: int) -> nn.Module:
    """Return the model of a fold; the second one has another shape."""
    model, generator = nn.Linear(3, 1 if fold != 1 else 2), torch.Generator().manual_seed(fold)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -1.0, 1.0, generator=generator)
    return model


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).pow(2).mean()
    return loss


def train_fold(job: Job, fold: int, epochs: int = 2) -> dict[str, Any]:
    """Train a fold; return its final weights, and the mean of a collective call."""
    model = model_of(fold).to("cpu")
    optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.05), model)
    loader = job.batches(data(fold), batch_size=4, seed=0)
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    mean = job.all_reduce({"fold": fold})["fold"]
    job.pull()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    return {"mean": mean, "weights": weights, "skipped": loader.skipped, "training": job.training}


def alone(fold: int) -> list[torch.Tensor]:
    """Return the final weights of a fold that two workers train in a job of its own.

    Plain torch: each update has the mean of the gradients of two batches.
    """
    from pscommon.core.data_loop import LoopSpec

    model, rows = model_of(fold), data(fold)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for epoch in range(2):
        spec = LoopSpec(0, len(rows), 4, seed=0, first_epoch=epoch)
        for number in range(0, spec.total, 2):
            optimizer.zero_grad()
            for batch in (number, number + 1):
                (loss_of(model, rows[spec.indices(batch).tolist()]) / 2).backward()
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def script(address: str, rank: int, folds: Iterator[int] | range, **options: Any) -> list[Any]:
    """Train the folds one after another; skip those that are over."""
    results = []
    for fold in folds:
        try:
            client = connected(address, rank, training=f"fold-{fold}", **options)
        except TrainingOver:
            results.append("over")
            continue
        with Job(client, rank) as job:
            results.append(train_fold(job, fold))
    return results


@each_lane
def test_each_fold_trains_a_fresh_model(cluster: Make, lanes: Any, caplog: Any) -> None:
    """With two workers and two servers the weights are those of plain torch."""
    caplog.set_level(logging.INFO)
    servers = cluster(2, min_workers=2)
    found = together(
        *(
            lambda rank=rank: script(servers.address, rank, range(3), lanes=lanes)  # type: ignore[misc]
            for rank in range(2)
        )
    )

    for fold in range(3):
        first, second = found[0][fold], found[1][fold]
        assert (first["mean"], first["skipped"]) == (fold, False)
        assert first["training"] == f"fold-{fold}"
        for mine, other, expected in zip(
            first["weights"], second["weights"], alone(fold), strict=True
        ):
            assert torch.equal(mine, other)
            torch.testing.assert_close(mine, expected)
    described = status(servers.address)
    assert (described["training"], described["trainings_finished"]) == (
        "fold-2",
        ["fold-0", "fold-1"],
    )
    assert (described["version"], described["steps"]) == (4, 8)
    began = [record.__dict__["training"] for record in records_of(caplog, "training_began")]
    assert began == ["fold-1", "fold-2"]


@pytest.mark.parametrize("rules", [{"policy": "async"}, {"policy": "ssp", "staleness": 1}])
def test_trainings_under_other_policies(cluster: Make, rules: dict[str, Any]) -> None:
    address = cluster(2, min_workers=2, **rules).address
    found = together(*(lambda r=r: script(address, r, range(2)) for r in range(2)))  # type: ignore[misc]
    for fold in range(2):
        assert [each[fold]["mean"] for each in found] == [fold, fold]
        for mine, other in zip(found[0][fold]["weights"], found[1][fold]["weights"], strict=True):
            assert mine.shape == other.shape
            assert not torch.equal(mine, model_of(fold).weight)


def test_a_worker_with_another_name_waits_for_the_members(cluster: Make) -> None:
    servers = cluster(1)
    first = Job(connected(servers.address, 0, training="a"), 0)
    with pytest.raises(WaitTimeoutError, match=r"training 'a' before 'b'.* worker 1 \(rank 0"):
        connected(servers.address, 1, training="b", wait_timeout=0.5)

    def next_training() -> str:
        with Job(connected(servers.address, 1, training="b"), 1) as job:
            return job.training

    def close_soon() -> str:
        until(lambda: status(servers.address)["workers"], "the first worker")
        first.close()
        return ""

    assert together(next_training, close_soon) == ["b", ""]
    with pytest.raises(TrainingOver) as caught:
        connected(servers.address, 0, training="a")
    assert (caught.value.reason, caught.value.exit_code) == ("TRAINING_OVER", 11)


@pytest.mark.full
@pytest.mark.every(3)
@pytest.mark.parametrize("durability", ["snapshot", "log"])
@pytest.mark.parametrize("stops", [True, False], ids=["stopped", "killed"])
def test_a_restarted_job_is_in_the_training_of_its_data(
    cluster: Make, tmp_path: Path, durability: str, stops: bool
) -> None:
    settings = {
        "data_dir": tmp_path,
        "durability": durability,
        "snapshot_every": SnapshotInterval(steps=2),
    }
    servers = cluster(2, **settings)
    script(servers.address, 0, range(2))
    before = status(servers.address)

    def is_saved() -> bool:
        versions = [each["version"] for each in status(servers.address)["snapshots"]]
        return max(versions, default=0) == before["version"]

    until(is_saved, "a snapshot of the last version")
    servers.stop() if stops else servers.close()

    servers = cluster(2, **settings)
    assert status(servers.address)["training"] == "fold-1"
    assert status(servers.address)["version"] == before["version"]
    found = script(servers.address, 0, range(3))
    assert found[0] == "over"
    assert found[1]["skipped"], "its passes were finished"
    assert found[2]["weights"][0].shape == (1, 3)
    assert status(servers.address)["trainings_finished"] == ["fold-0", "fold-1"]


@pytest.mark.parametrize("durability", ["snapshot", "log"])
def test_a_training_without_a_snapshot_yet_is_known_after_a_crash(
    cluster: Make, tmp_path: Path, durability: str
) -> None:
    settings = {"data_dir": tmp_path, "durability": durability}
    servers = cluster(2, **settings)
    script(servers.address, 0, range(1))
    connected(servers.address, 0, training="fold-1")
    servers.close()

    servers = cluster(2, **settings)
    found = status(servers.address)
    assert (found["training"], found["trainings_finished"]) == ("fold-1", ["fold-0"])
    servers.close()
    servers = cluster(2, **settings, resume="never")
    found = status(servers.address)
    assert (found["training"], found["trainings_finished"]) == ("", [])


def test_snapshots_of_an_earlier_training_are_set_aside(cluster: Make, tmp_path: Path) -> None:
    servers = cluster(
        1, data_dir=tmp_path, snapshot_every=SnapshotInterval(steps=1), snapshot_keep=2
    )
    script(servers.address, 0, range(1))
    until(lambda: status(servers.address)["snapshots"], "a snapshot")
    client = connected(servers.address, 0, training="fold-1")
    assert status(servers.address)["snapshots"] == []
    assert list((tmp_path / "snapshots").glob("*.aside-*"))
    client.close()


def test_servers_that_end_after_one_training_refuse_the_next(cluster: Make) -> None:
    servers = cluster(1, exit_when_done=True)
    client = connected(servers.address, 0, training="a")
    with pytest.raises(InvalidRequestError, match="--exit-when-done"):
        connected(servers.address, 1, training="b")
    client.close()


def test_clients_without_a_name_join_the_current_training(cluster: Make) -> None:
    servers = cluster(1)
    script(servers.address, 0, range(1))
    with connected(servers.address) as client:
        assert client.training == "fold-0"
    assert json.loads(json.dumps(status(servers.address)))["training"] == "fold-0"


def test_a_standby_follows_into_the_next_training(cluster: Make) -> None:
    servers = cluster(1)
    with RunningStandby(servers.servers[0]) as following:
        following.in_sync()
        script(servers.address, 0, range(2))
        following.in_sync()
        until(lambda: has_same_state(following), "the same state")
        coordinator = standby_state(following).coordinator
        assert coordinator is not None
        assert coordinator.job.trainings == Trainings("fold-1", ("fold-0",))
        assert standby_state(following).version == status(servers.address)["version"]
