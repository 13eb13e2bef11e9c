"""Changes of trained weights by the script are logged before the servers' weights overwrite
them; backward raises where plain torch raises.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pscommon.core.errors import InvalidRequestError
from psworker.client.local_client import LocalClient
from psworker.core.results import PushResult
from psworker.job import Job
from psworker.model import change_detector as changes
from psworker.optim.optimizer import ServerOptimizer

WARNING_TEXT = "weights_changed_by_script"


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def made(model: nn.Module, overlap: bool = False) -> ServerOptimizer:
    return Job(LocalClient()).optimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, overlap=overlap
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def clamp_in_place(model: nn.Sequential) -> None:
    with torch.no_grad():
        model[2].weight.clamp_(-0.01, 0.01)


def clamp_data(model: nn.Sequential) -> None:
    model[2].weight.data.clamp_(-0.01, 0.01)


def write_through_numpy(model: nn.Sequential) -> None:
    model[2].weight.detach().numpy()[0, 3] = 5.0


def load_weights(model: nn.Sequential) -> None:
    model[2].load_state_dict({"weight": torch.ones(1, 4), "bias": model[2].bias})


def replace_data(model: nn.Sequential) -> None:
    model[2].weight.data = torch.ones(1, 4)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(
    "change", [clamp_in_place, clamp_data, write_through_numpy, load_weights, replace_data]
)
def test_an_overwritten_change_is_logged_once_with_the_tensor(
    change: Callable[[nn.Sequential], None],
    steps: int,
    overlap: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = net()
    optimizer = made(model, overlap)
    train(model, optimizer, steps)
    optimizer.model.wait()
    assert WARNING_TEXT not in caplog.text

    change(model)
    train(model, optimizer)
    change(model)
    train(model, optimizer)

    assert caplog.text.count(WARNING_TEXT) == 1
    assert (
        "tensors=2.weight problem" in caplog.text
        or "tensors=2.weight, 2.bias problem" in caplog.text
    )
    assert "0.weight" not in caplog.text


def test_a_pull_logs_the_changes_that_it_overwrites(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    optimizer = made(model)

    clamp_data(model)
    optimizer.model.pull()

    assert "tensors=2.weight problem" in caplog.text


def test_the_log_line_names_only_a_few_tensors(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "MAX_NAMES_COUNT", 1)
    model = net()
    optimizer = made(model)

    model.load_state_dict(copy.deepcopy(model.state_dict()))
    train(model, optimizer)

    assert "tensors=0.weight and 3 more problem" in caplog.text


def test_a_large_model_is_compared_in_samples(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "SAMPLE_WORD_COUNT", 8)
    model = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 64), nn.Linear(64, 1))
    optimizer = made(model)
    train(model, optimizer)

    model[1].weight.data.clamp_(-0.01, 0.01)
    train(model, optimizer)

    assert "tensors=1.weight problem" in caplog.text


class Failing(LocalClient):
    """Client whose pulls write some weights and then fail."""

    def exchange(self, **call: object) -> PushResult:
        weights = call["weights"]
        assert isinstance(weights, memoryview)
        weights[:4] = b"\1\2\3\4"
        raise ConnectionError


def test_weights_written_by_a_failed_pull_are_not_reported_as_changes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = net()
    client = Failing()
    optimizer = Job(client).optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

    for _ in range(2):
        with pytest.raises(ConnectionError):
            optimizer.model.pull()

    assert WARNING_TEXT not in caplog.text


# ---- backward after a step -----------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_a_second_backward_after_a_step_raises_as_in_torch(overlap: bool) -> None:
    model = net()
    optimizer = made(model, overlap)
    loss = model(torch.ones(2, 4)).sum()

    loss.backward(retain_graph=True)
    optimizer.step()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class AdversarialPair(nn.Module):
    """Two networks of a GAN in one optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.judge = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def step_without(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in module.parameters():
        parameter.grad = None
    optimizer.step()
    optimizer.zero_grad()


def gan(
    model: AdversarialPair, judge: torch.optim.Optimizer, maker: torch.optim.Optimizer
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        fake = model.maker(torch.randn(8, 4, generator=generator))
        model.judge(fake.detach()).mean().backward()
        step_without(model.maker, judge)
        (-model.judge(fake)).mean().backward()
        step_without(model.judge, maker)
    return list(model.parameters())


@pytest.mark.parametrize("overlap", [False, True])
def test_tensors_without_a_gradient_do_not_change(overlap: bool) -> None:
    """A GAN computes its fakes once and uses their graph after the step of the other network."""
    torch.manual_seed(0)
    model = AdversarialPair()
    plain = copy.deepcopy(model)
    optimizer = made(model, overlap)

    mine = gan(model, optimizer, optimizer)
    theirs = gan(
        plain, *(torch.optim.SGD(part.parameters(), lr=0.1) for part in (plain.judge, plain.maker))
    )

    assert all(map(torch.equal, mine, theirs))


# ---- modules that change weights in forward ------------------------------------------------------


@pytest.mark.parametrize(
    "module", [nn.Embedding(4, 3, max_norm=1.0), nn.EmbeddingBag(4, 3, max_norm=1.0)]
)
def test_an_embedding_with_max_norm_is_refused_by_name(module: nn.Module) -> None:
    with pytest.raises(InvalidRequestError, match=r"words has max_norm.*make it without"):
        made(nn.ModuleDict({"words": module}))


def test_a_frozen_embedding_with_max_norm_is_accepted() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(4, 3, max_norm=1.0), "linear": nn.Linear(3, 1)})

    Job(LocalClient()).optimizer(torch.optim.SGD(model["linear"].parameters(), lr=0.1), model)


def test_a_changed_teacher_inside_the_optimizer_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """It never has a gradient; the next pull restores the weights of the job."""
    model = nn.ModuleDict(
        {"student": nn.Linear(4, 1), "teacher": nn.Linear(4, 1).requires_grad_(False)}
    )
    optimizer = made(model)

    for _ in range(2):
        model["student"](torch.ones(2, 4)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model["teacher"].weight.lerp_(model["student"].weight, 0.5)

    assert "tensors=teacher.weight problem" in caplog.text
