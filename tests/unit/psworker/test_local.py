"""PS_LOCAL=1 trains like a plain script: same batches, same optimizer, same weights."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import psworker
from pscommon.core.data_loop import LoopSpec
from psworker.client.local_client import LocalClient
from psworker.job import Job


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))


def test_a_script_trains_as_plain_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PS_LOCAL", "1")
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(1))
    y = x.sum(1, keepdim=True)
    model, plain = net(), net()

    with psworker.connect() as job:
        optimizer = job.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model)
        masks = []
        for batch_x, batch_y in job.batches((x, y), batch_size=6, epochs=3, seed=5):
            masks.append(torch.get_rng_state())
            F.mse_loss(model(batch_x), batch_y).backward()
            optimizer.step()
            optimizer.zero_grad()
    loop = LoopSpec(0, size=20, batch_size=6, epochs=3, seed=5)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for number in range(loop.total):
        indices = torch.from_numpy(loop.indices(number).copy())
        torch.set_rng_state(masks[number])
        F.mse_loss(plain(x[indices]), y[indices]).backward()
        theirs.step()
        theirs.zero_grad()

    assert job.version == loop.total == 12
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_ps_local_takes_precedence_over_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PS_LOCAL", "1")

    job = psworker.connect("127.0.0.1:9")

    assert job.policy == "local"


def test_overlap_without_servers_is_plain_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PS_LOCAL", "1")
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(1))
    runs = []

    for switch in ("off", "on"):
        monkeypatch.setenv("PS_OVERLAP", switch)
        model = net()
        with psworker.connect() as job:
            optimizer = job.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model)
            for batch in job.batches(x, batch_size=6, epochs=3, seed=5):
                F.mse_loss(model(batch), batch.sum(1, keepdim=True)).backward()
                optimizer.step()
                optimizer.zero_grad()
        runs.append(list(model.parameters()))

    assert all(torch.equal(mine, other) for mine, other in zip(*runs, strict=True))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("size", [0, 2])
def test_training_works_with_any_default_device(overlap: bool, size: int) -> None:
    """The default device `meta` would create tensors without bytes."""
    model = nn.ParameterList(torch.ones(size) for _ in range(3))
    plain = torch.optim.SGD([{"params": model.parameters()}], lr=0.5, momentum=0.9)

    with torch.device("meta"), Job(LocalClient()) as job:
        optimizer = job.optimizer(plain, model, overlap=overlap)
        for _ in range(2):
            for parameter in model:
                parameter.sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert all(parameter.tolist() == pytest.approx([-0.45] * size) for parameter in model)


@pytest.mark.full
@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_do_not_depend_on_the_default_device(num_workers: int) -> None:
    """The script still creates its own tensors on its default device."""
    model, rows = nn.Linear(2, 1), torch.arange(10.0).view(5, 2)
    plain = torch.optim.SGD(model.parameters(), lr=0.5)

    with torch.device("meta"), Job(LocalClient()) as job:
        job.optimizer(plain, model)
        made = [
            (batch.tolist(), torch.empty(1).device.type)
            for batch in job.batches(rows, 2, epochs=2, shuffle=False, num_workers=num_workers)
        ]

    assert made == [(rows[first : first + 2].tolist(), "meta") for first in (0, 2, 4)] * 2
