"""In a pipeline the next gradient is computed during a push; each push counts exactly once."""

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pscommon.core.data_loop import LoopSpec
from pscommon.core.errors import InvalidRequestError, NonFiniteError, UnreachableError
from psworker.client.local_client import LocalClient
from psworker.core.results import Lease, PushResult
from psworker.job import Job
from tests.support.late_client import values

DEADLINE = 30.0


class BlockedClient(LocalClient):
    """Client of an async job whose pushes wait for `go`.

    entered: Set when a push has begun.
    ends: Outcomes of the first pushes; None stands for applied.
    """

    policy = "async"

    def __init__(self, *ends: PushResult | Exception | None) -> None:
        super().__init__()
        self.go, self.entered = threading.Event(), threading.Event()
        self.go.set()
        self.ends = list(ends)
        self.pushes: list[dict[str, Any]] = []

    def exchange(self, **call: Any) -> PushResult:
        if call["gradients"] is None or not call.get("samples", 1):
            return super().exchange(**call)
        self.entered.set()
        assert self.go.wait(DEADLINE)
        self.pushes.append(call | {"gradients": bytes(call["gradients"])})
        end = self.ends.pop(0) if self.ends else None
        if isinstance(end, Exception):
            raise end
        if end is not None:
            super().exchange(gradients=None, weights=call["weights"])
            return end
        return super().exchange(**call)


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def started(client: LocalClient) -> tuple[Job, nn.Sequential, Any]:
    job, model = Job(client), net()
    return job, model, job.optimizer(sgd(model), model, pipeline=True)


def backward(model: nn.Module, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)
    F.mse_loss(model(x), y).backward()


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    backward(model, number)
    optimizer.step()
    optimizer.zero_grad()


def train_with_delay(steps: int) -> dict[str, Tensor]:
    """Train in plain torch with gradients computed before the previous step; return the values."""
    model, seen = net(), net()
    optimizer = sgd(model)
    for number in range(steps):
        backward(seen, number)
        pushed = {name: buffer.clone() for name, buffer in seen.named_buffers()}
        if number:
            seen.load_state_dict(dict(model.named_parameters()), strict=False)
        for mine, theirs in zip(model.parameters(), seen.parameters(), strict=True):
            mine.grad, theirs.grad = theirs.grad, None
        for name, buffer in model.named_buffers():
            buffer.copy_(pushed[name])
        optimizer.step()
    return values(model)


def test_each_gradient_is_one_step_late_and_none_is_lost() -> None:
    _, model, optimizer = started(BlockedClient())

    for number in range(6):
        step(model, optimizer, number)
    optimizer.model.wait()

    expected = train_with_delay(6)
    assert all(torch.equal(value, expected[name]) for name, value in values(model).items())


class SharedBufferClient(BlockedClient):
    """Client of a job in which another worker changes the running mean after each push."""

    def exchange(self, **call: Any) -> PushResult:
        result = super().exchange(**call)
        if call["gradients"] is not None and call["weights"] is not None:
            names = [spec.name for spec in self.plan.spec.tensors]
            extent = self.plan.extent(names.index("1.running_mean"))
            torch.frombuffer(call["weights"], dtype=torch.uint8)[extent.start : extent.stop].view(
                torch.float32
            ).fill_(7)
        return result


def test_a_buffer_changed_by_another_worker_is_adopted() -> None:
    _, model, optimizer = started(SharedBufferClient())
    plain = net()

    for number in range(3):
        step(model, optimizer, number)
        backward(plain, number)

    assert (model[1].running_mean == 7).all()
    assert model[1].num_batches_tracked == plain[1].num_batches_tracked == 3
    optimizer.model.wait()
    assert (model[1].running_mean == 7).all()
    assert model[1].num_batches_tracked == 3


def test_a_step_returns_before_its_push_ends() -> None:
    client = BlockedClient()
    job, model, optimizer = started(client)
    before = values(model)
    client.go.clear()

    backward(model, 0)
    optimizer.step()

    assert client.entered.wait(DEADLINE)
    assert job.last is None
    assert torch.equal(model[0].weight, before["0.weight"])
    client.go.set()
    job.wait()
    assert job.last is not None
    assert not torch.equal(model[0].weight, before["0.weight"])


def test_after_a_change_to_sync_each_step_waits_for_its_push() -> None:
    client = BlockedClient()
    job, model, optimizer = started(client)
    step(model, optimizer, 0)
    client.policy = "sync"

    for number in range(1, 4):
        step(model, optimizer, number)
        assert job.last is not None
        assert job.last.version == client.version == number + 1

    assert [push["base"] for push in client.pushes] == [0, 0, 2, 3]


def test_the_base_of_a_push_is_the_version_that_its_gradient_used() -> None:
    client = BlockedClient()
    job, model, optimizer = started(client)

    for number in range(4):
        step(model, optimizer, number)
    job.pull()
    step(model, optimizer, 4)
    job.wait()

    assert [push["base"] for push in client.pushes] == [0, 0, 1, 2, 4]


def test_reading_the_state_waits_for_the_last_push() -> None:
    client = BlockedClient()
    _, model, optimizer = started(client)

    step(model, optimizer, 0)
    state = model[0].state_dict()
    step(model, optimizer, 1)
    saved = optimizer.state_dict()

    assert client.version == 2
    assert torch.equal(state["weight"], model[0].weight)
    assert saved["paramserver"]["version"] == 2


def test_every_push_has_its_hyper_parameters() -> None:
    """The outcome of the previous push, and so of its hyper-parameters, is not known yet."""
    client = BlockedClient()
    _, model, optimizer = started(client)

    for number, lr in enumerate((0.1, 0.3, 0.1)):
        optimizer.param_groups[0]["lr"] = lr
        step(model, optimizer, number)
    optimizer.model.wait()

    assert len(client.pushes) == 3
    for push, lr in zip(client.pushes, (0.1, 0.3, 0.1), strict=True):
        assert f'"lr": {lr}' in push["groups_json"]


NAN = PushResult("rejected", 0, 0, "NON_FINITE: tensor 0.bias")
STALE = PushResult("stale", 7, staleness=4)

ENDS: dict[str, Callable[[Job, nn.Module, Any], object]] = {
    "the next step": lambda job, model, optimizer: step(model, optimizer, 1),
    "wait": lambda job, model, optimizer: job.wait(),
    "pull": lambda job, model, optimizer: job.pull(),
    "state_dict": lambda job, model, optimizer: model.state_dict(),
    "close": lambda job, model, optimizer: job.close(),
    "with": lambda job, model, optimizer: job.__exit__(None, None, None),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_a_rejected_push_raises_at_the_next_call(
    end: Callable[[Job, nn.Module, Any], object],
) -> None:
    job, model, optimizer = started(BlockedClient(NAN))
    step(model, optimizer, 0)

    with pytest.raises(NonFiniteError, match=r"tensor 0\.bias"):
        end(job, model, optimizer)


def test_leaving_with_an_error_does_not_wait_for_the_push() -> None:
    client = BlockedClient()
    job, model, optimizer = started(client)
    client.go.clear()
    step(model, optimizer, 0)

    with pytest.raises(ZeroDivisionError), job:
        _ = 1 / 0
    client.go.set()


def test_a_failed_push_is_repeated_and_counts_once() -> None:
    client = BlockedClient(UnreachableError("no answer"))
    _, model, optimizer = started(client)
    step(model, optimizer, 0)
    backward(model, 1)

    with pytest.raises(UnreachableError, match="no answer"):
        optimizer.step()
    optimizer.step()
    optimizer.model.wait()

    expected = train_with_delay(2)
    assert client.pushes[0] == client.pushes[1]
    assert client.version == 2
    assert all(torch.equal(value, expected[name]) for name, value in values(model).items())


class StrictClient(BlockedClient):
    """Client that fails if a worker waits for data while its own pushes are undecided."""

    def __init__(self, *ends: PushResult | None) -> None:
        super().__init__(*ends)
        self.returned: list[int] = []

    def next_batches(
        self, loop: LoopSpec, count: int = 1, idle: bool = False, first_open: int | None = None
    ) -> Lease:
        lease = super().next_batches(loop, count, idle, first_open)
        assert not (lease.end and idle) or len(self.pushes) == loop.total + len(self.returned)
        return lease if idle or lease.numbers else Lease()

    def return_batches(self, batches: Any, used: bool = False) -> None:
        self.returned += [batch.number for batch in batches if not used]
        super().return_batches(batches, used)


def test_the_loop_ends_with_every_batch_counted(caplog: pytest.LogCaptureFixture) -> None:
    client = StrictClient(None, None, STALE)
    job, model, optimizer = started(client)
    seen = 0

    with caplog.at_level(logging.WARNING, logger="psworker"):
        for batch in job.batches(torch.ones(12, 4), 4, shuffle=False):
            model(batch + torch.randn_like(batch)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += 1

    assert (seen, client.returned, client.version) == (4, [2], 3)
    assert (job.stats.steps, job.stats.stale) == (4, 1)
    assert "push_stale staleness=4 returned_batches=1" in caplog.text


def test_each_push_has_the_samples_and_batches_of_its_gradient() -> None:
    client = BlockedClient()
    job, model, optimizer = started(client)

    for number, batch in enumerate(job.batches(torch.randn(11, 4), 4, shuffle=False)):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert job.stats.steps == number + 1

    assert [
        (push["samples"], [key.number for key in push["batches"]]) for push in client.pushes
    ] == [
        (4, [0]),
        (4, [1]),
        (3, [2]),
    ]


class SyncClient(LocalClient):
    policy = "sync"


def test_a_pipeline_excludes_sync_and_overlap() -> None:
    model = net()

    with pytest.raises(InvalidRequestError, match="excludes policy sync"):
        Job(SyncClient()).optimizer(sgd(model), model, pipeline=True)
    with pytest.raises(InvalidRequestError, match="excludes overlap=True"):
        Job(BlockedClient()).optimizer(sgd(model), model, pipeline=True, overlap=True)


def test_without_servers_each_step_waits_for_its_push(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PS_OVERLAP", "on")
    job, model, optimizer = started(LocalClient())

    step(model, optimizer, 0)

    assert job.last is not None
    assert job.last.status == "applied"
