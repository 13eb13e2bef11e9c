"""With overlap a job computes exactly the weights of plain torch at any delay of the network.

The client of these tests fills weights with NaN until a wait, and copies gradients when they are
sent. A missing wait or a missing second transfer therefore changes the result.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pscommon.core.errors import NonFiniteError, UnreachableError
from psworker.core.results import PushResult
from psworker.job import Job
from psworker.steps import overlapped_step as overlap
from tests.support.late_client import LateClient, values
from tests.support.overlap_cases import (
    MODELS,
    STEPS,
    Make,
    Step,
    accumulated,
    adam,
    assert_equal,
    backward,
    batch,
    both,
    normed,
    perceptron,
    seeded,
    usual,
)


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "piece_nbytes", lambda nbytes: 128)


@pytest.mark.every(7)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_weights_equal_those_of_plain_torch(make: Make, step: Step) -> None:
    """The comparison is at the end, because reading weights earlier would wait for all of them."""
    plain, mine, client = both(make)

    for model, optimizer in (plain, mine):
        for number in range(7):
            step(model, optimizer, number)

    assert_equal(plain[0], mine[0])
    assert client.version == 7


def bytes_sent(client: LateClient) -> list[int]:
    """Return the sent bytes of each push; bytes sent twice count twice."""
    return [sum(stop - start for start, stop in spans) for spans in client.sent]


def test_gradients_are_sent_during_backward_last_layers_first() -> None:
    _, (model, optimizer), client = both(perceptron)
    backward(model, 0)
    left = client.sent[0].copy()
    optimizer.step()

    assert left == sorted(left, reverse=True)
    assert len(left) > 2
    assert bytes_sent(client)[0] == client.plan.section("trainable").nbytes
    assert client.sent[0] == left, "nothing was sent twice"


def test_accumulated_gradients_are_sent_once() -> None:
    _, (model, optimizer), client = both(perceptron)

    for number in range(3):
        accumulated(model, optimizer, number)

    complete = client.plan.section("trainable").nbytes
    assert bytes_sent(client) == [2 * complete, complete, complete]


def test_after_clipping_gradients_are_sent_at_the_step_for_some_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(overlap, "RETENTION_STEP_COUNT", 2)
    _, (model, optimizer), client = both(perceptron)
    left = []

    for number in range(5):
        backward(model, number)
        left.append(bool(client.open))
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()

    assert left == [True, False, False, True, False]


def test_an_unused_branch_delays_no_gradient() -> None:
    _, (model, optimizer), client = both(perceptron)
    model[0].requires_grad_(False)

    for number in range(2):
        usual(model, optimizer, number)
    backward(model, 2)

    assert client.sent[2], "trained layers were sent during backward"


def test_each_module_waits_only_for_its_own_weights() -> None:
    _, (model, optimizer), client = both(perceptron)
    missing: list[int] = []

    def observe(*_: Any) -> None:
        missing.append(client.open.missing if client.open else 0)

    usual(model, optimizer, 0)
    for layer in (model[0], model[2], model[4]):
        layer.register_forward_pre_hook(observe)
    usual(model, optimizer, 1)
    model(batch(2)[0])

    assert missing[3] > missing[4] > missing[5] == 0


def test_weights_of_an_uncalled_module_are_awaited_first() -> None:
    """The script may use its weights without a call."""
    _, (model, optimizer), client = both(perceptron)
    for _ in range(2):
        model[4](torch.randn(3, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model[4](torch.randn(3, 6))

    assert model[0].weight.isfinite().all()
    assert client.open is None


class BorrowedWeight(nn.Module):
    """Model that calls a module once, then omits it, then uses its weight without a call."""

    def __init__(self) -> None:
        super().__init__()
        self.lent, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 1:
            x = self.lent(x)
        elif self.calls > 2:
            x = x @ self.lent.weight
        out: Tensor = self.last(x)
        return out


def test_a_module_may_be_used_without_a_call_after_earlier_calls() -> None:
    plain, mine, _ = both(BorrowedWeight)

    for model, optimizer in (plain, mine):
        for number in range(4):
            usual(model, optimizer, number)

    assert_equal(plain[0], mine[0])


class DirectEvaluation(nn.Module):
    """Model that uses the weight of its submodule without a call in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(4, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.part(x) if self.training else x @ self.part.weight.T
        return out


def test_an_evaluation_may_read_weights_without_calling_their_module() -> None:
    _, (model, optimizer), _ = both(DirectEvaluation)
    usual(model, optimizer, 0)
    model.eval()

    with torch.no_grad():
        assert model(batch(1)[0]).isfinite().all()


def test_the_state_dict_of_a_submodule_waits_for_its_weights() -> None:
    plain, mine, _ = both(normed)

    for model, optimizer in (plain, mine):
        usual(model, optimizer, 0)
    states = [copy.deepcopy(model[1].state_dict()) for model, _ in (plain, mine)]

    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_arriving_weights_do_not_overwrite_loaded_ones() -> None:
    _, (model, optimizer), _ = both(perceptron)
    saved = values(model)

    usual(model, optimizer, 0)
    model.load_state_dict(saved)

    assert all(torch.equal(value, saved[name]) for name, value in values(model).items())


def test_an_explicit_wait_returns_when_all_weights_have_arrived() -> None:
    plain, (model, optimizer), client = both(perceptron)
    stored = model[0].weight
    usual(*plain, 0)
    usual(model, optimizer, 0)
    assert stored.isnan().any(), "the test's client is not late"

    optimizer.model.wait()

    assert torch.equal(stored, plain[0][0].weight)
    assert client.open is None


def test_a_copy_of_the_model_neither_waits_nor_sends(tmp_path: Any) -> None:
    _, (model, optimizer), client = both(normed)
    usual(model, optimizer, 0)
    optimizer.model.wait()

    twin = copy.deepcopy(model)
    torch.save(model, tmp_path / "model")
    usual(model, optimizer, 1)
    twin(batch(0)[0]).sum().backward()

    assert client.open is not None, "the copy has waited for weights, or sent gradients"
    assert twin.state_dict()["0.weight"].isfinite().all()


def test_a_pull_between_backward_and_step_loses_no_gradient() -> None:
    plain, mine, client = both(perceptron)

    for model, optimizer in (plain, mine):
        usual(model, optimizer, 0)
        backward(model, 1)
        if model is mine[0]:
            optimizer.model.pull()
        optimizer.step()
        optimizer.zero_grad()
        usual(model, optimizer, 2)

    assert_equal(plain[0], mine[0])
    assert client.version == 3


def test_gradients_of_a_skipped_step_do_not_reach_the_next_one() -> None:
    plain, mine, client = both(perceptron)

    for model, optimizer in (plain, mine):
        for number in range(4):
            backward(model, number)
            if number != 1:
                optimizer.step()
            optimizer.zero_grad()

    assert_equal(plain[0], mine[0])
    assert client.version == 3


def test_a_failed_transfer_of_weights_raises_in_forward() -> None:
    _, (model, optimizer), client = both(perceptron)
    usual(model, optimizer, 0)
    client.broken = True

    with pytest.raises(UnreachableError, match="the server is gone"):
        model(batch(1)[0])

    assert client.open is None


class FailingClient(LateClient):
    """Client whose second exchange fails."""

    def exchange(self, **call: Any) -> PushResult:
        if call["gradients"] is not None and len(self.sent) == 1:
            raise UnreachableError("no answer")
        return super().exchange(**call)


def test_a_failed_step_can_be_repeated() -> None:
    plain, client = (seeded(perceptron)), FailingClient()
    model = seeded(perceptron)
    optimizer = Job(client).optimizer(adam(model), model, overlap=True)
    backward(model, 0)

    with pytest.raises(UnreachableError, match="no answer"):
        optimizer.step()
    optimizer.step()
    usual(plain, adam(plain), 0)

    assert_equal(plain, model)
    assert client.version == 1


def test_a_nan_gradient_raises_and_changes_nothing() -> None:
    _, (model, optimizer), client = both(perceptron)
    before = values(model)
    backward(model, 0)
    assert model[4].bias.grad is not None
    model[4].bias.grad[0] = float("nan")

    with pytest.raises(NonFiniteError, match=r"4\.bias"):
        optimizer.step()

    assert client.version == 0
    assert all(torch.equal(value, before[name]) for name, value in values(model).items())


@pytest.mark.parametrize("reason", ["", "the script failed"])
def test_after_close_the_model_trains_like_a_plain_one(reason: str) -> None:
    plain, (twin, client) = (seeded(perceptron)), (seeded(perceptron), LateClient())
    job = Job(client)
    optimizer = job.optimizer(adam(twin), twin, overlap=True)
    usual(plain, adam(plain), 0)
    usual(twin, optimizer, 0)
    if reason:
        job.wait()
    job.close(reason)
    backward(twin, 1)
    backward(plain, 1)

    assert len(client.sent) == 1, "backward after the end has sent something"
    assert_equal(plain, twin)


@pytest.mark.parametrize(
    ("reported", "choice", "overlaps"),
    [
        ("", None, False),
        ("off", None, False),
        ("on", None, True),
        ("true", None, True),
        ("on", False, False),
        ("", True, True),
    ],
)
def test_the_argument_overlap_takes_precedence_over_the_environment(
    monkeypatch: pytest.MonkeyPatch, reported: str, choice: bool | None, overlaps: bool
) -> None:
    monkeypatch.setenv("PS_OVERLAP", reported)
    _, (model, optimizer), client = both(perceptron, overlap=choice)

    usual(model, optimizer, 0)

    assert bool(client.sent) == overlaps
