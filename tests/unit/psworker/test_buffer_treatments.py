"""What the servers make of each buffer, which frozen parameters travel, and what is refused."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import PerChannelMinMaxObserver

from pscommon.core.errors import InvalidRequestError
from psworker.client.local_client import LocalClient
from psworker.job import Job
from psworker.optim.optimizer import ServerOptimizer

EVENT = "frozen_changed_by_script"


class Model(nn.Module):
    """Norms, buffers of other modules, and a teacher."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student = nn.Linear(4, 4)
        self.batch, self.instance = (
            nn.BatchNorm1d(4),
            nn.InstanceNorm1d(4, track_running_stats=True),
        )
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("queue", torch.ones(3))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))
        self.register_buffer("local", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self.student(x) - self.teacher(x)).square().sum()
        return loss


def joined(
    model: nn.Module, buffers: Any = None, client: LocalClient | None = None, **how: Any
) -> tuple[Job, ServerOptimizer]:
    job = Job(client or LocalClient())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return job, job.optimizer(torch.optim.SGD(trained, lr=0.1), model, buffers=buffers, **how)


def treatments(buffers: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return role and treatment of each tensor that is not trainable."""
    client = LocalClient()
    joined(Model(), buffers, client)
    return {
        tensor.name: tensor.treatment or tensor.role
        for tensor in client.plan.spec.tensors
        if tensor.role != "trainable"
    }


DEFAULT = {
    "teacher.weight": "frozen",
    "teacher.bias": "frozen",
    "queue": "first",
    "place": "buffer",
    "batch.running_mean": "average",
    "batch.running_var": "average",
    "batch.num_batches_tracked": "buffer",
    "instance.running_mean": "average",
    "instance.running_var": "average",
    "instance.num_batches_tracked": "buffer",
}


def test_buffers_of_norms_are_averaged_and_others_come_from_the_first_push() -> None:
    assert treatments() == DEFAULT


@pytest.mark.parametrize(
    ("buffers", "changes"),
    [
        ({"queue": "average"}, {"queue": "average"}),
        ({"batch.*": "first"}, dict.fromkeys(["batch.running_mean", "batch.running_var"], "first")),
        ({"teacher.w*": "first"}, {"teacher.weight": "first"}),
        (
            {"queue": "first", "*ue": "average", "teacher.*": "average"},
            {"teacher.weight": "average", "teacher.bias": "average"},
        ),
        ({"place": "first"}, {}),
    ],
)
def test_patterns_choose_the_treatment_by_name(
    buffers: dict[str, str], changes: dict[str, str]
) -> None:
    """The first pattern that matches counts."""
    assert treatments(buffers) == DEFAULT | changes


def test_a_tied_frozen_parameter_is_found_under_each_of_its_names() -> None:
    model, client = Model(), LocalClient()
    model.again = model.teacher

    joined(model, {"again.bias": "first"}, client)

    found = {tensor.name: tensor.treatment for tensor in client.plan.spec.tensors}
    assert (found["teacher.bias"], found["teacher.weight"]) == ("first", None)


@pytest.mark.parametrize(
    ("buffers", "message"),
    [
        ({"techer.*": "first"}, r"'techer\.\*'.* matches neither .* nor a frozen parameter"),
        ({"student.*": "first"}, "matches neither"),
        ({"local": "first"}, "matches neither a persistent buffer"),
        ({"queue": "last"}, r"\{'queue': 'last'\} is no treatment.*\"average\" or \"first\""),
        ({"queue": None}, "is no treatment"),
        ({"place": "average"}, "place has dtype int64, which has no average"),
        ({3: "first"}, "no mapping of patterns"),
        (["queue"], "no mapping of patterns"),
    ],
)
def test_wrong_treatments_are_refused(buffers: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        joined(Model(), buffers)


# ---- tensors that servers cannot store -----------------------------------------------------------


@pytest.mark.parametrize("sparse", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
def test_sparse_tensors_are_refused_by_name(sparse: Callable[..., torch.Tensor]) -> None:
    model = Model()
    model.register_buffer("adjacent", sparse(torch.eye(4)))
    with pytest.raises(
        InvalidRequestError, match=r"buffer adjacent is sparse .*a dense tensor.*persistent=False"
    ):
        joined(model)

    model = Model()
    model.register_buffer("adjacent", sparse(torch.eye(4)), persistent=False)
    joined(model)

    model = Model()
    model.mask = nn.Parameter(sparse(torch.eye(4)), requires_grad=False)
    with pytest.raises(InvalidRequestError, match=r"parameter mask is sparse .*a dense tensor$"):
        joined(model)


class Observed(nn.Module):
    """A layer whose observer resizes its buffers in the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.observer = nn.Linear(4, 2), PerChannelMinMaxObserver()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.observer(self.layer.weight)
        loss: torch.Tensor = self.layer(x).sum()
        return loss


@pytest.mark.parametrize("overlap", [False, True])
def test_an_empty_buffer_that_is_resized_is_named(overlap: bool) -> None:
    model = Observed()
    _, optimizer = joined(model, overlap=overlap)
    model(torch.ones(1, 4)).backward()
    with pytest.raises(
        InvalidRequestError, match=r"observer\.m.._val has changed .*run a batch through the model"
    ):
        optimizer.step()

    model = Observed()
    model(torch.ones(1, 4))
    job, optimizer = joined(model, overlap=overlap)
    model(torch.ones(1, 4)).backward()
    optimizer.step()
    assert job.version == 1


def test_an_empty_buffer_may_be_replaced_by_an_empty_one() -> None:
    model = Model()
    model.register_buffer("cache", torch.zeros(0, 3))
    job, optimizer = joined(model)
    for _ in range(2):
        model.cache = torch.zeros(0, 3)
        optimizer.step()
    job.pull()

    assert model.cache.shape == (0, 3)
    assert job.version == 2


# ---- frozen parameters that the script changes ---------------------------------------------------


def move(model: Model) -> None:
    with torch.no_grad():
        model.teacher.weight.lerp_(model.student.weight, 0.5)


def move_data(model: Model) -> None:
    model.teacher.weight.data.mul_(0.5)


def replace_data(model: Model) -> None:
    """As the published MoCo does."""
    model.teacher.weight.data = model.teacher.weight.data * 0.5


def train(model: Model, optimizer: Any, change: Callable[[Model], None], steps: int = 3) -> None:
    for _ in range(steps):
        model(torch.ones(2, 4)).backward()
        optimizer.step()
        optimizer.zero_grad()
        change(model)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("change", [move, move_data, replace_data])
def test_a_change_of_a_frozen_parameter_is_logged_once(
    change: Callable[[Model], None], overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    _, optimizer = joined(model, overlap=overlap)
    train(model, optimizer, change)

    assert caplog.text.count(EVENT) == 1
    assert "tensors=teacher.weight problem" in caplog.text
    assert 'buffers={"teacher.*": "first"}' in caplog.text
    assert "weights_changed_by_script" not in caplog.text


def test_a_frozen_parameter_that_stays_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    job, optimizer = joined(model)
    train(model, optimizer, nn.Module.train)
    model.teacher.share_memory()
    train(model, optimizer, nn.Module.train)
    job.session.model.renew()
    train(model, optimizer, nn.Module.train)

    assert EVENT not in caplog.text


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("change", [move, move_data, replace_data])
def test_a_frozen_parameter_with_a_treatment_travels(
    change: Callable[[Model], None], overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, client = Model(), LocalClient()
    job, optimizer = joined(model, {"teacher.*": "first"}, client, overlap=overlap)
    parameter = model.teacher.weight
    train(model, optimizer, change)
    trained = parameter.detach().clone()
    assert model.teacher.weight is parameter
    assert isinstance(parameter, nn.Parameter)
    optimizer.step()
    job.pull()

    assert torch.equal(parameter, trained)
    assert EVENT not in caplog.text


def test_a_parameter_that_travels_may_be_replaced_by_another_object() -> None:
    model = Model()
    job, optimizer = joined(model, {"teacher.*": "first"})
    parameter = model.teacher.weight
    model.teacher.weight = nn.Parameter(torch.full((4, 4), 7.0), requires_grad=False)
    optimizer.step()
    job.pull()

    assert model.teacher.weight is parameter
    assert (parameter == 7).all()
