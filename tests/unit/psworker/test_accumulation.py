"""--global-batch in a worker: the batches of one update become one push."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pscommon.core.data_stream import Spec
from pscommon.core.errors import FencedError, InvalidRequestError
from pscommon.core.log_entries import BatchKey
from psworker.client.local_client import LocalClient
from psworker.core.results import Lease, PushResult
from psworker.job import Job
from psworker.optim.gradients import GradientAccumulation
from psworker.optim.optimizer import ServerOptimizer

DATA = torch.linspace(-1.0, 1.0, 11)[:, None]


class Groups(LocalClient):
    """Client that deals updates of `sizes` batches in turn and records the pushes."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.following = [after for size in sizes for after in reversed(range(size))]
        self.pushed: list[tuple[tuple[int, ...], int]] = []
        self.returned: list[BatchKey] = []

    def next_batches(
        self, loop: Spec, count: int = 1, idle: bool = False, first_open: int | None = None
    ) -> Lease:
        lease = super().next_batches(loop, count, idle, first_open)
        following = tuple(self.following[number % len(self.following)] for number in lease.numbers)
        return Lease(lease.numbers, lease.end, lease.sat_out, following)

    def exchange(self, **call: Any) -> PushResult:
        if call["gradients"] is not None:
            self.pushed.append((tuple(key.number for key in call["batches"]), call["samples"]))
        return super().exchange(**call)

    def return_batches(self, batches: Sequence[BatchKey], used: bool = False) -> None:
        self.returned += () if used else batches
        super().return_batches(batches, used)


def started(client: LocalClient, overlap: bool = False) -> tuple[Job, ServerOptimizer, nn.Module]:
    torch.manual_seed(0)
    job, model = Job(client), nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))
    return (
        job,
        job.optimizer(torch.optim.SGD(model.parameters(), lr=0.5), model, overlap=overlap),
        model,
    )


def train(client: LocalClient, batch_size: int, overlap: bool = False) -> tuple[list[bool], Tensor]:
    """Return whether an update was incomplete after each step, and the weights after an epoch."""
    job, optimizer, model = started(client, overlap)
    pending = []
    for batch in job.batches(DATA, batch_size, shuffle=False):
        (model(batch) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        pending.append(optimizer.pending)
    job.wait()
    return pending, torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("overlap", [False, True])
def test_the_batches_of_an_update_are_one_push_with_their_mean_gradient(overlap: bool) -> None:
    """Batches of 2, 2, 2 and of 2, 2, 1 train like batches of 6 and 5."""
    client = Groups([3])
    pending, weights = train(client, 2, overlap)

    assert client.pushed == [((0, 1, 2), 6), ((3, 4, 5), 5)]
    assert pending == [True, True, False] * 2
    torch.testing.assert_close(weights, train(LocalClient(), 6)[1])


@pytest.mark.parametrize("overlap", [False, True])
def test_updates_of_one_batch_equal_training_without_accumulation_bit_by_bit(overlap: bool) -> None:
    assert torch.equal(train(Groups([1]), 3, overlap)[1], train(LocalClient(), 3)[1])


def test_the_result_does_not_change_until_the_update_is_complete() -> None:
    job, optimizer, model = started(Groups([1, 2]))
    versions = []
    for batch in job.batches(DATA, 4, shuffle=False):
        before = [p.clone() for p in model.parameters()]
        model(batch).mean().backward()
        optimizer.step()
        versions.append((optimizer.pending, job.version, job.stats.steps))
        assert all(map(torch.equal, before, model.parameters())) == optimizer.pending

    assert versions == [(False, 1, 1), (True, 1, 1), (False, 2, 2)]


def test_batches_are_weighted_by_the_given_number_of_samples() -> None:
    job, optimizer, model = started(client := Groups([2]))
    parameter = next(model.parameters())
    for weight, _ in zip((3, 1), job.batches(DATA, 6, shuffle=False), strict=False):
        parameter.grad = torch.full_like(parameter, float(weight))
        optimizer.step(samples=weight)

    assert client.pushed == [((0, 1), 4)]
    assert parameter.grad is not None
    assert parameter.grad.flatten().tolist() == [2.5] * 3


def test_a_missing_gradient_in_one_batch_counts_as_zero() -> None:
    first, second, third = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    total = GradientAccumulation([first, second, third])
    first.grad = torch.tensor([4.0, 8.0])
    total.add(1)
    first.grad, second.grad = None, torch.tensor([2.0, 6.0])

    assert total.finish(3) == 4
    assert first.grad is not None
    assert (first.grad.tolist(), second.grad.tolist(), third.grad) == ([1.0, 2.0], [1.5, 4.5], None)
    assert total.finish(3) == 3


def test_half_precision_gradients_are_summed_in_single_precision() -> None:
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    total = GradientAccumulation([parameter])
    for _ in range(300):
        parameter.grad = torch.ones(1, dtype=torch.bfloat16)
        total.add(1)
    parameter.grad = torch.ones(1, dtype=torch.bfloat16)
    total.finish(1)

    assert parameter.grad.item() == 1.0
    assert parameter.grad.dtype == torch.bfloat16


def test_a_missing_step_at_the_end_of_an_update_is_an_error() -> None:
    job, _, _ = started(Groups([1]))

    with pytest.raises(InvalidRequestError, match="after a batch"):
        list(job.batches(DATA, 4))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("infinite", "moved"), [(None, 1.0), (0, 0.75), (1, 0.75), (2, 0.5)])
def test_gradscaler_may_skip_any_batch_of_an_update(
    infinite: int | None, moved: float, overlap: bool
) -> None:
    """A skipped batch counts as a zero gradient; an update of one batch changes nothing."""
    job, optimizer, model = started(client := Groups([2, 1]), overlap)
    parameter, scaler = next(model.parameters()), torch.amp.GradScaler("cpu", init_scale=4.0)
    before = parameter.detach().clone()
    for number, _ in enumerate(job.batches(DATA[:6], 2, shuffle=False)):
        loss = next(model.parameters()).sum() * (torch.inf if number == infinite else 1.0)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    assert client.pushed == [((0, 1), 4), ((2,), 2)]
    torch.testing.assert_close(before - moved, parameter.detach())


@pytest.mark.parametrize("first", [True, False])
def test_after_a_break_the_next_loop_completes_the_update(first: bool) -> None:
    """The script leaves the loop with the last batch of an update.

    first: zero_grad() precedes backward(), so pushed gradients are still in the parameters.
    """
    job, optimizer, model = started(client := Groups([2]))

    def train(batch: Tensor) -> None:
        optimizer.zero_grad()
        (model(batch) ** 2).mean().backward()
        optimizer.step()
        if not first:
            optimizer.zero_grad()

    for number, batch in enumerate(job.batches(DATA, 4, shuffle=False)):
        if number == 1:
            break
        train(batch)
    for batch in job.batches(DATA, 6, shuffle=False):
        train(batch)

    ((batches, _),) = client.pushed
    assert batches == (0, 1, 0, 1)


def test_an_evaluation_without_steps_does_not_change_later_updates() -> None:
    job, optimizer, model = started(client := Groups([2]))
    with torch.no_grad():
        assert len(list(job.batches(DATA, 6))) == 2
    for batch in job.batches(DATA, 6):
        model(batch).mean().backward()
        optimizer.step()

    assert client.pushed == [((0, 1), 11)]


def test_after_a_rejoin_earlier_gradients_are_discarded() -> None:
    job, optimizer, model = started(client := Groups([2]))
    parameter = next(model.parameters())
    for step, _ in enumerate(job.batches(DATA, 3, shuffle=False)):
        parameter.grad = torch.full_like(parameter, 10.0**step)
        if step == 1:
            job.session.rejoin(FencedError("the job went on"))
        optimizer.step()

    assert client.pushed == [((2, 3), 5)]
    assert parameter.grad is not None
    assert parameter.grad.flatten().tolist() == pytest.approx([(3 * 100 + 2 * 1000) / 5] * 3)
