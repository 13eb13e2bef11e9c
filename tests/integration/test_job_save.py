"""job.save writes one file of the job's newest weights, which torch loads under every name of the
state_dict.
"""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import psworker
from pscommon.core.errors import InvalidRequestError, NotSavedError
from pscommon.snapshot.atomic_files import AtomicFiles
from psworker import Client, Job
from psworker.simulation import DirectTransport, simulated
from tests.support.cluster import Cluster
from tests.support.workers import connected

Make = Callable[..., Cluster]


class TiedModel(nn.Module):
    """Tied weights as in a language model, BatchNorm buffers, a frozen layer, an unsaved buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4, dtype=torch.bfloat16).requires_grad_(False)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.same_norm = self.norm
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.norm(self.embedding(x))
        return self.head(hidden)  # type: ignore[no-any-return]


def trained(job: Job, steps: int = 2, **how: bool) -> TiedModel:
    torch.manual_seed(0)
    model = TiedModel()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = job.optimizer(torch.optim.SGD(parameters, lr=0.1), model, **how)
    for _ in range(steps):
        model(torch.tensor([0, 1, 2, 3])).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def check_same(file: Path, model: nn.Module) -> None:
    """Check the file against the model's state_dict, name by name and bit by bit, and load it."""
    saved, state = load_file(file), model.state_dict()
    assert saved.keys() == state.keys()
    assert all(torch.equal(saved[name], state[name]) for name in state)
    fresh = TiedModel()
    fresh.load_state_dict(saved, strict=True)
    assert torch.equal(fresh.head.weight, model.get_parameter("embedding.weight"))


@pytest.mark.parametrize("shards", [1, 3])
def test_the_file_equals_the_state_dict(cluster: Make, tmp_path: Path, shards: int) -> None:
    with Job(connected(cluster(shards).address, 0)) as job:
        model = trained(job)
        job.save(tmp_path / "model.safetensors")

        assert {
            "head.weight",
            "embedding.weight",
            "same_norm.running_mean",
        } <= model.state_dict().keys()
        check_same(tmp_path / "model.safetensors", model)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("how", ["overlap", "pipeline"])
def test_a_step_in_progress_is_awaited(cluster: Make, tmp_path: Path, how: str) -> None:
    with Job(connected(cluster(2, policy="async").address, 0)) as job:
        model = trained(job, **{how: True})
        job.save(tmp_path / "model.safetensors")
        check_same(tmp_path / "model.safetensors", model)
    assert job.version == 2


def test_a_simulation_saves_the_same(tmp_path: Path) -> None:
    simulated_servers = simulated(2, 1, "sync", None)
    simulated_servers.turns.enter(0)
    with Job(Client(lane=DirectTransport(simulated_servers, 0), rank=0)) as job:
        model = trained(job)
        job.save(tmp_path / "model.safetensors")
        check_same(tmp_path / "model.safetensors", model)


def test_without_servers_the_same_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PS_LOCAL", "1")
    with psworker.connect() as job:
        check = trained(job)
        job.save(str(tmp_path / "model.safetensors"))
        check_same(tmp_path / "model.safetensors", check)


def test_a_worker_saves_the_pushes_of_others_and_keeps_its_own_weights(
    cluster: Make, tmp_path: Path
) -> None:
    servers = cluster(2, policy="async")
    with Job(connected(servers.address, 0)) as job, Job(connected(servers.address, 1), 1) as other:
        model = trained(job, steps=1)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        version = job.version
        newest = trained(other, steps=3)
        job.save(tmp_path / "model.safetensors")

        check_same(tmp_path / "model.safetensors", newest)
        assert job.version == version
        assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)


@pytest.mark.parametrize("place", ["folder", "missing/model.safetensors"])
def test_an_invalid_path_is_reported(cluster: Make, tmp_path: Path, place: str) -> None:
    (tmp_path / "folder").mkdir()
    with Job(connected(cluster(1).address, 0)) as job:
        with pytest.raises(InvalidRequestError, match=r"call job\.optimizer first"):
            job.save(tmp_path / "model.safetensors")
        trained(job, 1)
        with pytest.raises(InvalidRequestError, match=r"it is a folder|does not exist"):
            job.save(tmp_path / place)


def test_a_failed_write_keeps_the_older_file(
    cluster: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.safetensors"
    file.write_text("older")

    def refuse(*_: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Job(connected(cluster(1).address, 0)) as job:
        trained(job, 1)
        monkeypatch.setattr(AtomicFiles, "save", refuse)
        with pytest.raises(NotSavedError, match="No space left") as caught:
            job.save(file)

    assert (caught.value.reason, caught.value.exit_code) == ("NOT_SAVED", 15)
    assert file.read_text() == "older"
    assert list(tmp_path.iterdir()) == [file]
