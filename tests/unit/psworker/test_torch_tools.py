"""Tools of torch work with the optimizer of a job as with any other."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from pscommon.core.errors import InvalidRequestError
from psworker.client.local_client import LocalClient
from psworker.core.results import PushResult
from psworker.job import Job
from psworker.optim.optimizer import ServerOptimizer


def started(client: LocalClient, overlap: bool = False) -> tuple[Job, ServerOptimizer, nn.Linear]:
    torch.manual_seed(0)
    job, model = Job(client), nn.Linear(3, 2)
    optimizer = job.optimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model, overlap=overlap)
    return job, optimizer, model


@pytest.mark.parametrize("options", [{}, {"flatten_optimizer_state_dict": True}])
def test_distributed_checkpoints_make_no_step(options: dict[str, Any]) -> None:
    """For an optimizer without state torch creates one by a step with zero gradients."""
    job, optimizer, model = started(LocalClient())
    for _ in range(2):
        saved = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**options))
        optimizer.param_groups[0]["lr"] = 0.5
        set_optimizer_state_dict(model, optimizer, saved, options=StateDictOptions(**options))

    assert job.version == 0
    assert optimizer.param_groups[0]["lr"] == 0.1


class PushRecorder(LocalClient):
    """Client that records the samples and the gradient of each push."""

    def __init__(self) -> None:
        super().__init__()
        self.pushed: list[tuple[int, float]] = []

    def exchange(self, **call: Any) -> PushResult:
        if call["gradients"] is not None:
            self.pushed.append((call["samples"], call["gradients"][:4].cast("f")[0]))
        return super().exchange(**call)


class OverflowingModel(nn.Module):
    """Weight with a gradient of 3 times the mean of the batch, infinite for negative batches."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, batch: Tensor) -> Tensor:
        return (self.weight * 3.0 * batch.where(batch > 0, torch.inf)).mean()


def gradient(model: OverflowingModel) -> float:
    assert model.weight.grad is not None
    return model.weight.grad.item()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("unscaled", [False, True])
def test_batches_skipped_by_gradscaler_have_no_weight(
    first: bool, overlap: bool, unscaled: bool
) -> None:
    """first: zero_grad() precedes backward. Hooks run only at steps and see unscaled gradients."""
    job, model = Job(client := PushRecorder()), OverflowingModel()
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.5), model, overlap=overlap)
    seen: list[float] = []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer.register_step_pre_hook(lambda *_: seen.append(gradient(model)))
    for batch in job.batches(
        torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, -1.0, 2.0, 2.0, 4.0]), 2, shuffle=False
    ):
        if first:
            optimizer.zero_grad()
        scaler.scale(model(batch)).backward()  # type: ignore[no-untyped-call]
        if unscaled:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if not first:
            optimizer.zero_grad()
    job.wait()

    assert client.pushed == [(2, 3.0), (2, 6.0), (1, 12.0)]
    assert seen == [3.0, 6.0, 12.0]
    assert model.weight.item() == 1.0 - 0.5 * 21.0
    assert scaler.get_scale() == 2.0**8


def test_gradscaler_refuses_half_precision_weights_as_in_torch() -> None:
    model = nn.Linear(3, 2, dtype=torch.float16)
    optimizer = Job(LocalClient()).optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(model(torch.ones(4, 3, dtype=torch.float16)).sum()).backward()  # type: ignore[no-untyped-call]

    with pytest.raises(ValueError, match="unscale FP16"):
        scaler.step(optimizer)


def test_step_hooks_receive_the_arguments_of_the_script() -> None:
    _, optimizer, _ = started(LocalClient())
    seen: list[tuple[int, list[str]]] = []
    optimizer.register_step_pre_hook(lambda _, args, kwargs: seen.append((len(args), list(kwargs))))
    optimizer.step()
    optimizer.step(lambda: 1.0)
    optimizer.step(samples=3)

    assert seen == [(1, []), (2, []), (1, ["samples"])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradscaler_unscales_gradients_as_in_torch(dtype: torch.dtype) -> None:
    """A scale that is no power of two shows the last bit."""
    models = [nn.Linear(30, 20, dtype=dtype) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    plain, ours = (torch.optim.SGD(model.parameters(), lr=0.1) for model in models)
    for model, optimizer in zip(
        models, (plain, Job(LocalClient()).optimizer(ours, models[1])), strict=True
    ):
        scaler = torch.amp.GradScaler("cpu", init_scale=3.7)
        for step in range(3):
            x = torch.randn(8, 30, dtype=dtype, generator=torch.Generator().manual_seed(step))
            scaler.scale(model(x).square().mean()).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()

    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_compiled_function_may_make_steps(overlap: bool) -> None:
    """This is the recipe of PyTorch for optimizers; the step itself is not compiled."""
    job, optimizer, model = started(LocalClient(), overlap)
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    for _ in range(2):
        model(torch.ones(4, 3)).sum().backward()
        step()

    assert job.version == 2


@pytest.mark.filterwarnings("ignore:Seems like:UserWarning")
def test_a_copied_scheduler_works_and_a_copied_optimizer_makes_no_steps() -> None:
    job, optimizer, model = started(LocalClient())
    scheduler = copy.deepcopy(torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5))
    copied = scheduler.optimizer
    model(torch.ones(4, 3)).sum().backward()
    with pytest.raises(
        InvalidRequestError, match=r"a copy of a job's optimizer.*that job\.optimizer"
    ):
        copied.step()
    scheduler.step()
    scheduler.step()
    assert job.version == 0
    assert optimizer.param_groups[0]["lr"] == 0.1

    optimizer.load_state_dict(copied.state_dict())
    optimizer.step()
    assert job.version == 1
    assert optimizer.param_groups[0]["lr"] == 0.05
