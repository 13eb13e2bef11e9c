"""The optimizer of a job: steps, hyper-parameters, schedulers, state dicts and statistics."""

import io
import itertools
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import psworker
from pscommon.core.data_loop import LoopSpec
from pscommon.core.errors import InvalidRequestError
from psworker.client.local_client import LocalClient
from psworker.core.results import PushResult
from psworker.job import Job
from psworker.optim.optimizer import ServerOptimizer


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def started(
    client: LocalClient | None = None, **hyper: Any
) -> tuple[Job, nn.Linear, ServerOptimizer]:
    job, net = Job(client or LocalClient()), model()
    settings = {"lr": 0.1, "momentum": 0.9} | hyper
    return job, net, job.optimizer(torch.optim.SGD(net.parameters(), **settings), net)


def gradient(net: nn.Module, value: float = 1.0) -> None:
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, value)


class RecordingClient(LocalClient):
    """Client that records its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[dict[str, Any]] = []
        self.reasons: list[str] = []
        self.phases: list[str] = []

    def exchange(self, **call: Any) -> PushResult:
        self.sent.append(call)
        return super().exchange(**call)

    def progress(self, **values: Any) -> None:
        self.phases.append(values["phase"])

    def leave(self, reason: str = "") -> None:
        self.reasons.append(reason)


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
        gradient(net)
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
    plain, net = model(), model()
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
    job, net = Job(LocalClient()), model()
    theirs = torch.optim.SGD(net.parameters(), lr=0.1)

    mine = job.optimizer(theirs, net)
    theirs.param_groups[0]["lr"] = 0.7

    assert isinstance(mine, torch.optim.Optimizer)
    assert mine.param_groups[0]["lr"] == 0.7


def test_only_changed_hyper_parameters_are_sent() -> None:
    client = RecordingClient()
    _, net, optimizer = started(client)

    for lr in (0.1, 0.1, 0.2):
        optimizer.param_groups[0]["lr"] = lr
        gradient(net)
        optimizer.step()

    samples = [call["groups_json"] for call in client.sent]
    assert [bool(text) for text in samples] == [True, False, True]
    assert '"lr": 0.2' in samples[2]


def test_a_learning_rate_changed_in_place_is_sent() -> None:
    """torch.compile needs a tensor as learning rate; schedulers change it in place."""
    client = RecordingClient()
    _, net, optimizer = started(client, lr=torch.tensor(0.5))

    for _ in range(3):
        gradient(net)
        optimizer.step()
        optimizer.param_groups[0]["lr"].mul_(0.5)

    assert [json.loads(call["groups_json"])[0]["lr"] for call in client.sent] == [0.5, 0.25, 0.125]


def test_step_evaluates_a_closure_and_returns_its_loss() -> None:
    _, net, optimizer = started()
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
    job, net = Job(LocalClient()), model()
    own = torch.optim.SGD(net.parameters(), lr=0.1)
    job.optimizer(own, net).zero_grad()
    gradient(net)
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
    _, net, optimizer = started()
    gradient(net)

    optimizer.zero_grad(set_to_none=False)
    assert net.weight.grad is not None
    assert not net.weight.grad.any()
    optimizer.zero_grad()
    assert net.weight.grad is None


def test_a_push_without_batches_has_one_sample_or_the_given_number() -> None:
    client = RecordingClient()
    _, net, optimizer = started(client)
    gradient(net)

    optimizer.step()
    optimizer.step(samples=40)

    assert [call["samples"] for call in client.sent] == [1, 40]


def test_a_state_dict_can_be_saved_and_loaded_and_names_its_job() -> None:
    _, net, optimizer = started(lr=0.3)
    gradient(net)
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)

    client = RecordingClient()
    _, other_net, other = started(client, lr=0.1)
    other.load_state_dict(saved)
    gradient(other_net)
    other.step()
    other.param_groups[0]["lr"] = 0.7
    other.step()

    assert '"lr": 0.7' in client.sent[1]["groups_json"]
    assert saved["paramserver"] == {"job": "local", "version": 1}
    assert '"lr": 0.3' in client.sent[0]["groups_json"]


def test_a_scheduler_continues_from_its_state_dict() -> None:
    _, net, optimizer = started()
    scheduler = lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    rates = schedule(net, optimizer, scheduler, 3)
    saved = optimizer.state_dict(), scheduler.state_dict()
    rates += schedule(net, optimizer, scheduler, 5)

    _, other_net, other = started()
    other_scheduler = lr_scheduler.StepLR(other, step_size=2, gamma=0.5)
    other.load_state_dict(saved[0])
    other_scheduler.load_state_dict(saved[1])

    assert schedule(other_net, other, other_scheduler, 5) == rates[3:]


def used(
    kind: type[torch.optim.Optimizer], net: nn.Module, steps: int = 1, **hyper: Any
) -> torch.optim.Optimizer:
    optimizer = kind(net.parameters(), **hyper)
    for _ in range(steps):
        gradient(net)
        optimizer.step()
    return optimizer


def test_loading_the_state_of_a_plain_optimizer_is_refused() -> None:
    _, _, optimizer = started()
    state = used(torch.optim.SGD, model(), lr=0.5, momentum=0.9).state_dict()

    with pytest.raises(
        psworker.InvalidRequestError, match=r"its state cannot be brought.*--resume"
    ):
        optimizer.load_state_dict(state)
    optimizer.load_state_dict({**state, "state": {}})

    assert optimizer.param_groups[0]["lr"] == 0.5


def test_an_optimizer_that_has_made_steps_is_refused() -> None:
    net = model()

    with pytest.raises(psworker.InvalidRequestError, match="has made steps"):
        Job(LocalClient()).optimizer(used(torch.optim.Adam, net), net)
    Job(LocalClient()).optimizer(used(torch.optim.Adagrad, net, steps=0), net)


def test_a_job_has_one_model_with_fixed_parameters() -> None:
    job, net, optimizer = started()

    with pytest.raises(
        psworker.InvalidRequestError, match="job has its model and optimizer already"
    ):
        job.optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
    with pytest.raises(psworker.InvalidRequestError, match="switch requires_grad"):
        optimizer.add_param_group({"params": [torch.ones(2, requires_grad=True)]})


def test_a_nan_gradient_raises_with_the_tensor_and_changes_nothing() -> None:
    job, net, optimizer = started()
    before = net.weight.clone()
    gradient(net)
    assert net.bias.grad is not None
    net.bias.grad[0] = float("nan")

    with pytest.raises(psworker.NonFiniteError, match="bias"):
        optimizer.step()

    assert torch.equal(net.weight, before)
    assert job.version == 0
    gradient(net)
    optimizer.step()
    assert job.version == 1


class LongPushClient(RecordingClient):
    """Client that reports longer times than the step took, as overlapped pushes may."""

    def exchange(self, **call: Any) -> PushResult:
        return replace(
            super().exchange(**call), seconds={"push": 9.0, "wait": 9.0, "apply": 9.0, "pull": 9.0}
        )


class StaleClient(RecordingClient):
    """Client whose pushes are all stale."""

    def exchange(self, **call: Any) -> PushResult:
        super().exchange(gradients=None, weights=call["weights"])
        return PushResult("stale", 7, staleness=4)


def test_a_stale_step_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    client = StaleClient()
    job, net, optimizer = started(client)
    data = torch.arange(8.0).reshape(4, 2)

    with caplog.at_level(logging.WARNING, logger="psworker"):
        for number, _ in enumerate(job.batches(data, 2, shuffle=False)):
            gradient(net)
            optimizer.step()
            if number == 1:
                break
    again = client.next_batches(LoopSpec(0, size=4, batch_size=2), count=9)

    assert job.last == PushResult("stale", 7, staleness=4)
    assert job.stats.stale == 2
    assert again.numbers == (0, 1)
    assert "push_stale staleness=4" in caplog.text


def test_stats_contain_the_seconds_of_each_phase() -> None:
    client = RecordingClient()
    job, net, optimizer = started(client)

    for _ in job.batches(torch.ones(6, 3), 2):
        gradient(net)
        optimizer.step()

    assert (job.stats.steps, job.stats.samples) == (3, 6)
    assert set(job.stats.last) == {"data", "pull", "compute", "push", "wait", "apply"}
    assert job.stats.last["apply"] > 0
    assert job.stats.total["compute"] > job.stats.last["compute"] > 0
    assert job.stats.samples_per_second > 0
    assert {"data", "compute", "push", "idle"} <= set(client.phases)


def test_phases_add_up_to_the_wall_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seconds that the exchange reports divide the script's waiting time; they do not add to
    it.
    """
    ticks = itertools.count()
    monkeypatch.setattr(
        "psworker.session.step_stats.time", SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    )
    job, net, optimizer = started(LongPushClient())
    job.enter("compute")  # tick 0

    for _ in range(3):
        gradient(net)
        optimizer.step()
        assert min(job.stats.last.values()) >= 0
    job.stats.finish_step(0, {})

    assert sum(job.stats.total.values()) == next(ticks) - 1


def test_wait_without_a_step_returns_at_once() -> None:
    Job(LocalClient()).wait()
    job, _, _ = started()
    job.wait()

    assert job.last is None


def test_resume_advances_a_scheduler_to_the_version_of_the_job() -> None:
    client = LocalClient()
    client.version = 5
    job, _, optimizer = started(client)
    scheduler = lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    job.resume(scheduler)

    assert scheduler.last_epoch == 5
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**5)


def test_reported_values_are_converted_to_floats() -> None:
    client = LocalClient()

    Job(client).report(loss=torch.tensor(0.5), accuracy=1)

    assert client.metrics == {"loss": 0.5, "accuracy": 1.0}


def test_a_job_leaves_once_with_the_reason() -> None:
    fine, broken = RecordingClient(), RecordingClient()

    with Job(fine) as job:
        job.close()
    with pytest.raises(ZeroDivisionError), Job(broken):
        _ = 1 / 0

    assert fine.reasons == [""]
    assert broken.reasons == ["ZeroDivisionError: division by zero"]


class UnreachableClient(LocalClient):
    def leave(self, reason: str = "") -> None:
        raise psworker.UnreachableError("no answer")


def test_an_error_while_leaving_does_not_hide_the_error_of_the_script() -> None:
    with pytest.raises(ZeroDivisionError), Job(UnreachableClient()):
        _ = 1 / 0
    with pytest.raises(psworker.UnreachableError), Job(UnreachableClient()):
        pass
