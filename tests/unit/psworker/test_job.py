"""The optimizer of a job: steps, hyper-parameters, schedulers and state dicts."""

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import psworker
from pscommon.core.errors import InvalidRequestError
from psworker.client.local_client import LocalClient
from psworker.job import Job
from tests.support.one_layer_job import RecordingClient, make_model, set_gradients, start_job

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=3, gamma=0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=12),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=8),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, 1.0, 4), lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[4],
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, factor=0.5),
}


def schedule(
    net: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, steps: int = 10
) -> list[float]:
    rates = []
    for _ in range(steps):
        set_gradients(net)
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_lr_schedulers_change_the_rate_as_in_torch(
    make: Callable[[torch.optim.Optimizer], Any], early: bool
) -> None:
    """OneCycleLR also changes the momentum. early: the scheduler gets the original optimizer."""
    plain, net = make_model(), make_model()
    theirs, own = (
        torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (plain, net)
    )
    made = make(own) if early else None
    mine = Job(LocalClient()).optimizer(own, net)

    rates = schedule(plain, theirs, make(theirs)), schedule(net, mine, made or make(mine))

    assert rates[0] == rates[1]
    assert len(set(rates[0])) > 1
    assert torch.equal(plain.weight, net.weight)


def test_the_optimizer_is_a_torch_optimizer_with_the_same_groups() -> None:
    job, net = Job(LocalClient()), make_model()
    theirs = torch.optim.SGD(net.parameters(), lr=0.1)

    mine = job.optimizer(theirs, net)
    theirs.param_groups[0]["lr"] = 0.7

    assert isinstance(mine, torch.optim.Optimizer)
    assert mine.param_groups[0]["lr"] == 0.7


def test_each_push_has_the_hyper_parameters_as_they_stand() -> None:
    client = RecordingClient()
    _, net, optimizer = start_job(client)

    for lr in (0.1, 0.1, 0.2):
        optimizer.param_groups[0]["lr"] = lr
        set_gradients(net)
        optimizer.step()

    rates = [json.loads(call["groups_json"])[0]["lr"] for call in client.sent]
    assert rates == [0.1, 0.1, 0.2]


def test_a_learning_rate_changed_in_place_is_sent() -> None:
    """torch.compile needs a tensor as learning rate; schedulers change it in place."""
    client = RecordingClient()
    _, net, optimizer = start_job(client, lr=torch.tensor(0.5))

    for _ in range(3):
        set_gradients(net)
        optimizer.step()
        optimizer.param_groups[0]["lr"].mul_(0.5)

    assert [json.loads(call["groups_json"])[0]["lr"] for call in client.sent] == [0.5, 0.25, 0.125]


def test_step_evaluates_a_closure_and_returns_its_loss() -> None:
    _, net, optimizer = start_job()
    before = net.weight.clone()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = net(torch.ones(2, 3)).sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)

    assert loss is not None
    assert loss.requires_grad
    assert not torch.equal(net.weight, before)


def test_a_step_of_the_original_optimizer_is_refused() -> None:
    """It would change only the weights of this worker."""
    job, net = Job(LocalClient()), make_model()
    own = torch.optim.SGD(net.parameters(), lr=0.1)
    job.optimizer(own, net).zero_grad()
    set_gradients(net)
    before = net.weight.clone()

    with pytest.raises(
        InvalidRequestError, match=r"call step\(\) of the optimizer that job\.optimizer"
    ):
        own.step()
    assert torch.equal(net.weight, before)

    job.close()
    own.step()
    assert not torch.equal(net.weight, before)


def test_zero_grad_behaves_as_in_torch() -> None:
    _, net, optimizer = start_job()
    set_gradients(net)

    optimizer.zero_grad(set_to_none=False)
    assert net.weight.grad is not None
    assert not net.weight.grad.any()
    optimizer.zero_grad()
    assert net.weight.grad is None


def test_a_push_without_batches_has_one_sample_or_the_given_number() -> None:
    client = RecordingClient()
    _, net, optimizer = start_job(client)
    set_gradients(net)

    optimizer.step()
    optimizer.step(samples=40)

    assert [call["samples"] for call in client.sent] == [1, 40]


def test_a_state_dict_can_be_saved_and_loaded_and_names_its_job() -> None:
    _, net, optimizer = start_job(lr=0.3)
    set_gradients(net)
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)

    client = RecordingClient()
    _, other_net, other = start_job(client, lr=0.1)
    assert saved.pop("paramserver") == {"job": "local", "training": "0", "version": 1}
    other.load_state_dict(saved)
    set_gradients(other_net)
    other.step()
    other.param_groups[0]["lr"] = 0.7
    other.step()

    assert '"lr": 0.7' in client.sent[1]["groups_json"]
    assert '"lr": 0.3' in client.sent[0]["groups_json"]


def test_a_scheduler_continues_from_its_state_dict() -> None:
    _, net, optimizer = start_job()
    scheduler = lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    rates = schedule(net, optimizer, scheduler, 3)
    saved = optimizer.state_dict(), scheduler.state_dict()
    rates += schedule(net, optimizer, scheduler, 5)

    _, other_net, other = start_job()
    other_scheduler = lr_scheduler.StepLR(other, step_size=2, gamma=0.5)
    del saved[0]["paramserver"]  # momentum of the other job is dropped
    other.load_state_dict(saved[0])
    other_scheduler.load_state_dict(saved[1])

    assert schedule(other_net, other, other_scheduler, 5) == rates[3:]


def used(
    kind: type[torch.optim.Optimizer], net: nn.Module, steps: int = 1, **hyper: Any
) -> torch.optim.Optimizer:
    optimizer = kind(net.parameters(), **hyper)
    for _ in range(steps):
        set_gradients(net)
        optimizer.step()
    return optimizer


def test_loading_the_state_of_a_plain_optimizer_is_refused() -> None:
    _, _, optimizer = start_job()
    state = used(torch.optim.SGD, make_model(), lr=0.5, momentum=0.9).state_dict()

    with pytest.raises(
        psworker.InvalidRequestError, match=r"its state cannot be brought.*--resume"
    ):
        optimizer.load_state_dict(state)
    optimizer.load_state_dict({**state, "state": {}})

    assert optimizer.param_groups[0]["lr"] == 0.5


def test_the_state_dict_of_another_job_is_refused_if_it_lacks_moments() -> None:
    """Each run without servers is a job of its own."""
    _, net, optimizer = start_job()
    unused = optimizer.state_dict()
    set_gradients(net)
    optimizer.step()
    state = optimizer.state_dict()

    for job in ("local", "job-1"):
        _, _, other = start_job(lr=0.5)
        with pytest.raises(
            psworker.InvalidRequestError, match=rf"no moments.*job {job} at version 1.*--data-dir"
        ):
            other.load_state_dict({**state, "paramserver": {"job": job, "version": 1}})
        assert other.param_groups[0]["lr"] == 0.5
        other.load_state_dict({key: state[key] for key in state if key != "paramserver"})
        assert other.param_groups[0]["lr"] == 0.1
        other.load_state_dict(unused)

    optimizer.load_state_dict(state)


def test_the_state_dict_of_an_optimizer_without_state_can_go_to_another_job() -> None:
    _, net, optimizer = start_job(momentum=0.0, lr=0.3)
    set_gradients(net)
    optimizer.step()
    _, _, other = start_job(momentum=0.0)

    other.load_state_dict(optimizer.state_dict())

    assert other.param_groups[0]["lr"] == 0.3


def test_an_optimizer_that_has_made_steps_is_refused() -> None:
    net = make_model()

    with pytest.raises(psworker.InvalidRequestError, match="has made steps"):
        Job(LocalClient()).optimizer(used(torch.optim.Adam, net), net)
    Job(LocalClient()).optimizer(used(torch.optim.Adagrad, net, steps=0), net)


def test_a_job_has_one_model_with_fixed_parameters() -> None:
    job, net, optimizer = start_job()

    with pytest.raises(
        psworker.InvalidRequestError, match="without a name is the only one of its job"
    ):
        job.optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
    with pytest.raises(psworker.InvalidRequestError, match="switch requires_grad"):
        optimizer.add_param_group({"params": [torch.ones(2, requires_grad=True)]})


def test_a_nan_gradient_raises_with_the_tensor_and_changes_nothing() -> None:
    job, net, optimizer = start_job()
    before = net.weight.clone()
    set_gradients(net)
    assert net.bias.grad is not None
    net.bias.grad[0] = float("nan")

    with pytest.raises(psworker.NonFiniteError, match="bias"):
        optimizer.step()

    assert torch.equal(net.weight, before)
    assert job.version == 0
    set_gradients(net)
    optimizer.step()
    assert job.version == 1


def test_resume_advances_a_scheduler_to_the_version_of_the_job() -> None:
    client = LocalClient()
    client.version = 5
    job, _, optimizer = start_job(client)
    scheduler = lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    job.resume(scheduler)

    assert scheduler.last_epoch == 5
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**5)


def test_a_scheduler_of_another_class_is_resumed_by_its_step() -> None:
    """Scripts bring schedulers that know no optimizer."""

    class Warmup:
        steps = 0

        def step(self) -> None:
            self.steps += 1

    job, *_ = start_job()
    warmup = Warmup()
    job.resume(warmup)  # type: ignore[arg-type]
    job.resume(warmup, steps=3)  # type: ignore[arg-type]

    assert warmup.steps == 3
