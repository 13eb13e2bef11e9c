"""What a PyTorch user expects of models and optimizers holds on two workers and two servers.

Each case is trained twice: by workers on servers, and by one torch process. In the process every
worker computes from the same state, gradients and floating buffers are averaged, and the optimizer
makes one step.
"""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import psworker
from psworker import Job
from tests.support.cluster import Cluster
from tests.support.torch_scripts import (
    ROUNDS,
    WORKERS,
    Named,
    assert_alike,
    compute_gradient,
    copy_state,
    make_adam,
    noise,
    train_on_servers,
    train_plain,
    with_fixed_parameters,
)
from tests.support.training_threads import real, simulated

Make = Callable[..., Cluster]


# ---- models --------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight
        self.output = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.output(self.second(self.first(x).tanh()))
        return out


class BranchingModel(nn.Module):
    """Uses one of two layers, by a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 1), nn.Linear(6, 1)])
        self.used = 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers[self.used](x)
        return out


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 3, batch_first=True)
        self.output = nn.utils.parametrizations.weight_norm(nn.Linear(3, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.output(self.lstm(x.view(-1, 3, 2))[0][:, -1])
        return out


def normed() -> nn.Module:
    return with_fixed_parameters(
        nn.Sequential(nn.Linear(6, 4, bias=False), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
    )


def two_layers() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))
    with_fixed_parameters(model)
    return model


def test_tied_weights_are_one_tensor_and_stay_tied() -> None:
    models = []

    def make() -> nn.Module:
        models.append(with_fixed_parameters(Tied()))
        return models[-1]

    runs = train_on_servers(make)

    assert_alike(runs, train_plain(lambda: with_fixed_parameters(Tied())))
    for model in models:
        assert isinstance(model, Tied)
        assert model.first.weight is model.second.weight


def test_frozen_parameters_do_not_move() -> None:
    def optimize(model: nn.Module) -> torch.optim.Optimizer:
        first, _, second = model.children()
        first.requires_grad_(False)
        return torch.optim.AdamW(second.parameters(), lr=0.02)

    runs = train_on_servers(two_layers, optimize=optimize)

    assert_alike(runs, train_plain(two_layers, optimize=optimize))
    assert torch.equal(runs[0][-1]["0.weight"], two_layers()[0].weight)


def test_parameters_may_be_frozen_and_unfrozen_during_training() -> None:
    """Gradual unfreezing: the optimizer has all, requires_grad selects those that change."""

    def compute(model: nn.Module, rank: int, number: int) -> None:
        first, _, second = model.children()
        first.requires_grad_(number >= 2)
        second.requires_grad_(number != 4)
        compute_gradient(model, rank, number)

    runs = train_on_servers(two_layers, compute)

    assert_alike(runs, train_plain(two_layers, compute))
    assert torch.equal(runs[0][1]["0.weight"], two_layers()[0].weight)
    assert not torch.equal(runs[0][2]["0.weight"], two_layers()[0].weight)


@pytest.mark.parametrize(
    "used",
    [
        lambda rank, number: number % 2,
        lambda rank, number: rank,
        lambda rank, number: number * rank % 2,
    ],
)
def test_a_parameter_without_a_gradient_does_not_change(used: Callable[[int, int], int]) -> None:
    """For all workers: no step, no decay, no moment. For some: it counts as zero there."""

    def compute(model: nn.Module, rank: int, number: int) -> None:
        assert isinstance(model, BranchingModel)
        model.used = used(rank, number)
        compute_gradient(model, rank, number)

    assert_alike(
        train_on_servers(lambda: with_fixed_parameters(BranchingModel()), compute),
        train_plain(lambda: with_fixed_parameters(BranchingModel()), compute),
    )


def test_weights_restored_by_the_script_count_without_a_gradient() -> None:
    """Sharpness-aware minimisation: the gradient at nearby weights, then the former weights as
    other tensors. Servers send only what a step has changed.
    """

    def compute(model: nn.Module, rank: int, number: int) -> None:
        assert isinstance(model, BranchingModel)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1)
        model.used = number % 2
        compute_gradient(model, rank, number)
        for parameter, value in zip(model.parameters(), before, strict=True):
            parameter.data = value

    assert_alike(
        train_on_servers(lambda: with_fixed_parameters(BranchingModel()), compute),
        train_plain(lambda: with_fixed_parameters(BranchingModel()), compute),
    )


def test_batch_norm_statistics_are_averaged_and_equal_after_each_step() -> None:
    runs = train_on_servers(normed)

    assert_alike(runs, train_plain(normed))
    assert runs[0][-1]["1.num_batches_tracked"] == ROUNDS
    assert not torch.equal(runs[0][0]["1.running_mean"], runs[0][1]["1.running_mean"])


def test_buffers_outside_the_state_dict_stay_local() -> None:
    counts = {}

    def compute(model: nn.Module, rank: int, number: int) -> None:
        model.get_buffer("own").add_(rank + 1)
        counts[rank] = float(model.get_buffer("own"))
        compute_gradient(model, rank, number)

    def make() -> nn.Module:
        model = two_layers()
        model.register_buffer("own", torch.zeros(()), persistent=False)
        return model

    train_on_servers(make, compute)

    assert counts == {0: ROUNDS, 1: 2 * ROUNDS}


def test_gradients_accumulate_over_several_batches() -> None:
    def compute(model: nn.Module, rank: int, number: int) -> None:
        for part in range(3):
            compute_gradient(model, rank, 10 * number + part)

    assert_alike(train_on_servers(normed, compute), train_plain(normed, compute))


def test_clipping_before_the_step_applies_to_the_sent_gradient() -> None:
    norms: list[float] = []

    def compute(model: nn.Module, rank: int, number: int) -> None:
        compute_gradient(model, rank, number)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))

    runs = train_on_servers(two_layers, compute)

    assert min(norms) > 0.5, "nothing was clipped: the test proves nothing"
    assert_alike(runs, train_plain(two_layers, compute))


def test_recurrent_layers_and_parametrizations_are_supported() -> None:
    assert_alike(
        train_on_servers(lambda: with_fixed_parameters(Recurrent())),
        train_plain(lambda: with_fixed_parameters(Recurrent())),
    )


def test_every_worker_starts_from_the_first_ones_weights() -> None:
    """Whatever its own initial model, frozen tensors and buffers included."""

    def script(job: Job) -> Named:
        torch.manual_seed(job.rank)
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        model.get_buffer("1.running_mean").fill_(job.rank)
        mine = copy_state(model)
        job.optimizer(torch.optim.SGD(model[0].parameters(), lr=0.1), model)
        return mine if job.rank == 0 else copy_state(model)

    first, second = simulated(2, script, shards=2)

    assert all(torch.equal(first[name], second[name]) for name in first)


# ---- optimizers ----------------------------------------------------------------------------------


def test_each_group_has_its_own_schedule() -> None:
    """LambdaLR over two groups, stepped with every step."""

    def script(job: Job | None, model: nn.Sequential, compute: Callable[[int], None]) -> Named:
        groups = [{"params": model[0].parameters(), "lr": 0.05}, {"params": model[2].parameters()}]
        original = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
        optimizer: torch.optim.Optimizer = job.optimizer(original, model) if job else original
        rates = [lambda step: 0.8**step, lambda step: 1.0 + step]
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rates)
        for number in range(ROUNDS):
            compute(number)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        return copy_state(model)

    def worker(job: Job) -> Named:
        model = two_layers()
        return script(job, model, lambda number: compute_gradient(model, 0, number))

    alone = two_layers()
    expected = script(None, alone, lambda number: compute_gradient(alone, 0, number))

    for state in simulated(WORKERS, worker, shards=2):
        assert all(torch.allclose(state[name], expected[name], rtol=1e-11) for name in expected)


def test_a_saved_model_and_optimizer_continue_in_another_job(cluster: Make) -> None:
    """Plain SGD has no moments, so state dicts are sufficient."""

    def train(job: Job, model: nn.Module, saved: Any, rounds: range) -> bytes:
        if saved:
            model.load_state_dict(saved["model"])
        optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        if saved:
            optimizer.load_state_dict(saved["optimizer"])
            scheduler.load_state_dict(saved["scheduler"])
        for number in rounds:
            compute_gradient(model, job.rank, number)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        file = io.BytesIO()
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
        return file.getvalue()

    def job(saved: bytes, rounds: range) -> bytes:
        loaded = torch.load(io.BytesIO(saved), weights_only=True) if saved else None
        address = cluster(2, min_workers=2).address
        return real(address, 2, lambda job: train(job, normed(), loaded, rounds))[0]

    all_states, halves = (
        torch.load(io.BytesIO(file), weights_only=True)
        for file in (job(b"", range(ROUNDS)), job(job(b"", range(3)), range(3, ROUNDS)))
    )

    assert all_states["optimizer"]["param_groups"] == halves["optimizer"]["param_groups"]
    assert all_states["scheduler"] == halves["scheduler"]
    assert all(
        torch.equal(all_states["model"][name], halves["model"][name])
        for name in all_states["model"]
    )


def test_local_mode_equals_one_worker_with_one_server(
    cluster: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PS_LOCAL=1: same batches, same dropout, same weights."""
    data = noise(30, 6, seed=1)

    def script(job: Job) -> Named:
        layers = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1)
        model = with_fixed_parameters(nn.Sequential(*layers))
        optimizer = job.optimizer(make_adam(model), model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        for batch in job.batches(data, 7, epochs=3, seed=2):
            F.mse_loss(model(batch), batch.sum(1, keepdim=True)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        return copy_state(model)

    (served,) = real(cluster(1).address, 1, script)
    monkeypatch.setenv("PS_LOCAL", "1")
    with psworker.connect() as job:
        alone = script(job)

    assert all(torch.allclose(alone[name], served[name], rtol=1e-12, atol=1e-13) for name in alone)
