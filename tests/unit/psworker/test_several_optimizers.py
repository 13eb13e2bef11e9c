"""Several optimizers of a script: when they register, and what each push weighs."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from pscommon.core.errors import InvalidRequestError
from psworker import Job
from psworker.client.local_client import LocalClient
from tests.support.events import records_of
from tests.support.push_recorder import PushRecorder, TwoPerUpdate, two
from tests.support.small_gan import (
    BATCH,
    data,
    handed_over,
    networks,
    optimizers,
    step_discriminator,
    step_generator,
    train_step,
)


@pytest.fixture
def client() -> PushRecorder:
    return PushRecorder()


@pytest.fixture
def job(client: PushRecorder) -> Iterator[Job]:
    with Job(client) as made:
        yield made


# ---- registration


@pytest.mark.parametrize("first_use", ["pass", "step", "pull", "save"])
def test_models_are_registered_together_at_the_first_use(
    job: Job, client: PushRecorder, first_use: str, tmp_path: Any
) -> None:
    nets = networks()
    made = handed_over(job, nets)
    assert not hasattr(client, "plan")

    match first_use:
        case "pass":
            next(iter(job.batches(data(), BATCH)))
        case "step":
            train_step(nets, made, *data()[:BATCH])
        case "pull":
            job.pull()
        case "save":
            job.save(tmp_path / "file")

    names = {tensor.name for tensor in client.plan.spec.tensors}
    assert names == {f"{n}.{key}" for n, net in nets.items() for key in net.state_dict()}
    assert list(client.plan.spec.optimizers) == ["d", "g"]


def test_the_order_of_the_calls_does_not_matter() -> None:
    specs = []
    for order in ("dg", "gd"):
        client, nets = LocalClient(), networks()
        made = optimizers(nets)
        with Job(client) as job:
            for name in order:
                job.optimizer(made[name], nets[name], name=name)
            job.pull()
        specs.append(client.plan.spec)

    assert specs[0].fingerprint() == specs[1].fingerprint()


def test_one_module_may_hold_the_parameters_of_both(job: Job, client: PushRecorder) -> None:
    """As in actor-critic methods, where both have layers in common."""
    model = nn.ModuleDict({name: nn.Linear(1, 1) for name in ("actor", "critic", "shared")})
    made = [
        job.optimizer(torch.optim.SGD(model[name].parameters(), lr=0.1), model, name=name)
        for name in ("actor", "critic")
    ]
    job.pull()

    tensors = {tensor.name: tensor for tensor in client.plan.spec.tensors}
    assert tensors["actor.critic.weight"].aliases == ("critic.critic.weight",)
    assert (tensors["actor.actor.weight"].group, tensors["actor.critic.weight"].group) == (0, 1)
    assert tensors["actor.shared.weight"].role == "frozen"
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model["critic"](model["shared"](torch.ones(1, 1))).sum().backward()
    made[1].step()
    changed = {
        key for key, value in model.state_dict().items() if not torch.equal(value, before[key])
    }
    assert changed == {"critic.weight", "critic.bias"}


# ---- steps


def test_a_push_has_the_gradients_of_its_own_optimizer(job: Job, client: PushRecorder) -> None:
    nets = networks()
    made = handed_over(job, nets)
    job.pull()
    train_step(nets, made, *data()[:BATCH])

    assert all(p.grad is not None for p in nets["d"].parameters())
    assert client.absent == [
        {f"g.{key}" for key in nets["g"].state_dict()},
        {f"d.{key}" for key in nets["d"].state_dict()},
    ]
    assert (job.version, client.update_counts) == (2, {"d": 1, "g": 1})


def test_a_push_weighs_the_samples_since_the_last_step_of_its_optimizer(
    job: Job, client: PushRecorder
) -> None:
    """The first push after a batch commits it, whichever optimizer makes it."""
    nets = networks()
    made = handed_over(job, nets)
    for number, (points, noise) in enumerate(job.batches(data(), BATCH)):
        step_discriminator(nets, made, points, noise)
        if number % 3 == 2:
            step_generator(nets, made, points, noise)

    d, g = ("d", BATCH, 1), ("g", 3 * BATCH, 0)
    assert client.pushed == [d, d, d, g, d, d, d, g]
    assert (job.stats.steps, job.stats.samples) == (8, 6 * BATCH)


def test_either_optimizer_may_make_the_first_push_after_a_batch(
    job: Job, client: PushRecorder
) -> None:
    nets = networks()
    made = handed_over(job, nets)
    for points, noise in job.batches(data(), BATCH):
        step_generator(nets, made, points, noise)
        step_discriminator(nets, made, points, noise)

    assert client.pushed == [("g", BATCH, 1), ("d", BATCH, 0)] * 6
    assert job.stats.samples == 6 * BATCH


def test_each_optimizer_sends_its_own_hyper_parameters(job: Job, client: PushRecorder) -> None:
    nets = networks()
    made = handed_over(job, nets)
    for number, (points, noise) in enumerate(job.batches(data(), BATCH)):
        train_step(nets, made, points, noise)
        if number == 1:
            made["g"].param_groups[0]["lr"] = 0.25

    rates = [json.loads(text)[0]["lr"] for text in client.groups]
    assert rates == [rates[0], rates[1], rates[0], rates[1]] + [rates[0], 0.25] * 4
    assert len({rates[0], rates[1], 0.25}) == 3
    assert client.groups[0].count('"betas"') == 2


def test_a_lost_membership_voids_the_steps_of_its_batch_only(
    job: Job, client: PushRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker is fenced at the first step of a batch: neither step of it counts."""
    nets, statuses = networks(), []
    made = handed_over(job, nets)
    client.fenced_push = 3
    for points, noise in job.batches(data(), BATCH):
        train_step(nets, made, points, noise)
        statuses.append([made[name].result.status for name in "dg"])

    applied = ["applied", "applied"]
    assert statuses == [applied, ["stale", "stale"], *[applied] * 4]
    assert client.update_counts == {"d": 5, "g": 5}


def test_a_membership_lost_at_the_second_step_loses_this_step(
    job: Job, client: PushRecorder
) -> None:
    nets, statuses = networks(), []
    made = handed_over(job, nets)
    client.fenced_push = 4
    for points, noise in job.batches(data(), BATCH):
        train_step(nets, made, points, noise)
        statuses.append([made[name].result.status for name in "dg"])

    applied = ["applied", "applied"]
    assert statuses == [applied, ["applied", "stale"], *[applied] * 4]


def test_schedulers_are_fast_forwarded_at_the_registration() -> None:
    client = LocalClient()
    nets = networks()
    with Job(client) as job:
        made = optimizers(nets)
        used = {name: job.optimizer(made[name], nets[name], name=name) for name in nets}
        schedulers = [
            torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            for optimizer in (used["d"], made["g"])
        ]
        for scheduler in schedulers:
            job.resume(scheduler)
        agree = client.agree

        def agreed(spec: Any) -> Any:
            plan = agree(spec)
            client.update_counts.update(d=3, g=1)
            return plan

        client.agree = agreed  # type: ignore[method-assign]
        assert [scheduler.last_epoch for scheduler in schedulers] == [0, 0]
        job.pull()

        assert [scheduler.last_epoch for scheduler in schedulers] == [3, 1]
        late = torch.optim.lr_scheduler.StepLR(used["d"], 1, 0.5)
        job.resume(late)
        assert late.last_epoch == 3


def test_a_membership_lost_between_steps_without_passes_voids_the_second_step(
    job: Job, client: PushRecorder
) -> None:
    """As in actor-critic methods: one backward gives both optimizers their gradients."""
    first, second = two(job)
    made = job._optimizers._optimizers
    job.pull()
    client.fenced_push = 1
    (first(torch.ones(1, 1)) + second(torch.ones(1, 1))).sum().backward()

    made["a"].step()
    made["b"].step()

    assert [made[name].result.status for name in "ab"] == ["stale", "stale"]
    assert client.version == 0
    made["b"].step()
    assert made["b"].result.status == "applied"


def test_all_gradients_of_other_weights_are_void(job: Job, client: PushRecorder) -> None:
    """Registration in a step gives the networks the job's weights; a closure comes after it."""
    first, second = two(job)
    start = client.start

    def start_with_other_weights(memory: memoryview) -> None:
        start(memory)
        torch.frombuffer(memory, dtype=torch.float32).add_(1.0)

    client.start = start_with_other_weights  # type: ignore[method-assign]
    made = job._optimizers._optimizers
    second(torch.ones(1, 1)).sum().backward()

    made["a"].step(lambda: first(torch.ones(1, 1)).sum().backward())
    made["b"].step()

    assert [made[name].result.status for name in "ab"] == ["applied", "stale"]
    assert "Try: job.pull() before the first forward pass" in made["b"].result.reason


def test_settings_may_change_before_the_registration(job: Job, client: PushRecorder) -> None:
    """The job registers what it was given, as with one optimizer; changes come with a step."""
    first, _ = two(job)
    made = job._optimizers._optimizers
    made["a"].param_groups[0]["lr"] = 0.5
    job.pull()
    first(torch.ones(1, 1)).sum().backward()
    made["a"].step()

    assert client.plan.spec.optimizers["a"].groups[0]["lr"] == 0.1
    assert '"lr": 0.5' in client.groups[0]


def test_samples_of_an_evaluation_count_in_no_step_without_gradients(
    job: Job, client: PushRecorder
) -> None:
    nets = networks()
    made = handed_over(job, nets)
    for _ in job.batches(data(), BATCH):
        nets["g"].zero_grad()
    for points, noise in job.batches(data(), BATCH):
        train_step(nets, made, points, noise)
        break

    assert client.pushed[:2] == [("d", BATCH, 7), ("g", BATCH, 0)]


def test_each_optimizer_makes_an_update_of_a_global_batch() -> None:
    client, nets = TwoPerUpdate(), networks()
    with Job(client) as job:
        made = handed_over(job, nets)
        for points, noise in job.batches(data(), BATCH):
            train_step(nets, made, points, noise)

    assert client.pushed == [("d", 2 * BATCH, 2), ("g", 2 * BATCH, 0)] * 3


def test_a_step_for_a_part_of_a_global_batch_is_refused() -> None:
    nets = networks()
    with Job(TwoPerUpdate()) as job:
        made, batches = handed_over(job, nets), iter(job.batches(data(), BATCH))
        for number in range(2):
            points, noise = next(batches)
            step_discriminator(nets, made, points, noise)
            if number == 0:
                step_generator(nets, made, points, noise)

        with pytest.raises(InvalidRequestError, match=r"step\(\) is missing after a batch"):
            next(batches)


def test_a_step_that_grad_scaler_leaves_out_weighs_nothing_later(
    job: Job, client: PushRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    nets = networks()
    made = handed_over(job, nets)
    for number, (points, noise) in enumerate(job.batches(data(), BATCH)):
        for name in "dg":
            made[name].found_inf = torch.tensor(float(number == 0))
        train_step(nets, made, points, noise)
        made["d"].zero_grad()
        made["g"].zero_grad()

    assert client.pushed[:2] == [("d", BATCH, 2), ("g", BATCH, 0)]
    assert not records_of(caplog, "batches_unused")
