"""A job without servers computes exactly the weights of plain torch: a test of the model
adapter.
"""

import copy
from collections.abc import Callable, Iterable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pscommon.core.errors import InvalidRequestError
from psworker.client.local_client import LocalClient
from psworker.job import Job

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]


@pytest.fixture(autouse=True, params=["few tensors", "many tensors"])
def amount(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test both ways to gather gradients: all at once, and one tensor at a time by two threads."""
    if request.param == "many tensors":
        monkeypatch.setattr("psworker.model.adapter.THREADED_TENSOR_COUNT", 2)
        monkeypatch.setattr("psworker.model.adapter.cores", lambda: 2)


def data(steps: int, width: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(8, width, generator=generator), torch.randn(8, 2, generator=generator))
        for _ in range(steps)
    ]


def perceptron() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def both(model: nn.Module, make: Make) -> tuple[tuple[nn.Module, Any], tuple[nn.Module, Any]]:
    """Return the model with a plain optimizer, and a copy with the optimizer of a job."""
    twin = copy.deepcopy(model)
    return (model, make(model.parameters())), (
        twin,
        Job(LocalClient()).optimizer(make(twin.parameters()), twin),
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> None:
    for x, y in data(steps):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_equal(model: nn.Module, twin: nn.Module) -> None:
    theirs = twin.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, theirs[name]), name


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "nesterov": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adagrad that starts from 1": lambda p: torch.optim.Adagrad(
        p, lr=0.01, initial_accumulator_value=1.0
    ),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.001, momentum=0.5, centered=True),
}
sgd = OPTIMIZERS["nesterov"]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_optimizer_computes_the_weights_of_torch(make: Make) -> None:
    plain, mine = both(perceptron(), make)

    train(*plain)
    train(*mine)

    assert_equal(plain[0], mine[0])


def test_batch_norm_buffers_are_those_of_torch() -> None:
    plain, mine = both(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)), sgd)

    train(*plain)
    train(*mine)

    assert_equal(plain[0], mine[0])
    assert mine[0][1].num_batches_tracked == 5


def test_gradient_accumulation_and_clipping() -> None:
    plain, mine = both(perceptron(), sgd)

    for model, optimizer in (plain, mine):
        for number, (x, y) in enumerate(data(6)):
            F.mse_loss(model(x), y).backward()
            if number % 2 == 1:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()

    assert_equal(plain[0], mine[0])


def test_hooks_of_the_scripts_optimizer_run_at_each_step() -> None:
    made: list[torch.optim.Optimizer] = []
    states: list[dict[str, Any]] = []

    def hooked(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        clip = nn.utils.clip_grad_norm_
        optimizer.register_step_pre_hook(
            lambda o, *_: clip(o.param_groups[0]["params"], 0.1) and None
        )
        optimizer.register_step_post_hook(lambda o, *_: made.append(o))
        optimizer.register_state_dict_post_hook(lambda _, state: states.append(state))
        return optimizer

    plain, mine = both(perceptron(), hooked)

    train(*plain)
    made.clear()
    train(*mine)
    mine[1].state_dict()

    assert_equal(plain[0], mine[0])
    assert made == [mine[1]] * 5
    assert len(states) == 1


def test_groups_may_have_different_hyper_parameters() -> None:
    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        first, *rest = parameters
        return torch.optim.AdamW(
            [{"params": rest, "lr": 0.02}, {"params": [first], "weight_decay": 0.5}], lr=0.01
        )

    plain, mine = both(perceptron(), make)

    train(*plain)
    train(*mine)

    assert_equal(plain[0], mine[0])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.out.weight = self.into.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(torch.relu(self.into(x)))
        return out[:, :2]


def test_tied_weights_count_once_and_stay_tied() -> None:
    plain, mine = both(Tied(), sgd)
    model, client = Tied(), LocalClient()

    train(*plain)
    train(*mine)
    Job(client).optimizer(sgd(model.parameters()), model)

    assert_equal(plain[0], mine[0])
    assert mine[0].into.weight is mine[0].out.weight
    assert [t.name for t in client.plan.spec.tensors] == ["into.weight"]


def test_parameters_outside_the_optimizer_are_frozen() -> None:
    model = perceptron()
    before = copy.deepcopy(model.state_dict())
    client = LocalClient()

    train(model, Job(client).optimizer(torch.optim.SGD(model[2].parameters(), lr=0.1), model))

    assert [t.role for t in client.plan.spec.tensors] == [
        "frozen",
        "frozen",
        "trainable",
        "trainable",
    ]
    assert torch.equal(model[0].weight, before["0.weight"])
    assert not torch.equal(model[2].weight, before["2.weight"])


class SelfDistillation(nn.Module):
    """Model whose frozen teacher is a moving average of its student."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(4, 2)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.student.weight, 0.5)
        out: Tensor = self.student(x) + self.teacher(x)
        return out


def test_changes_of_frozen_parameters_by_the_script_are_retained() -> None:
    torch.manual_seed(1)
    plain, mine = both(SelfDistillation(), lambda p: sgd(list(p)[:2]))

    for model, optimizer in (plain, mine):
        train(model, optimizer)
    mine[1].model.pull()

    assert_equal(plain[0], mine[0])


def test_a_parameter_that_is_unfrozen_later_is_trained() -> None:
    plain, mine = both(perceptron(), sgd)

    for model, optimizer in (plain, mine):
        model[0].requires_grad_(False)
        train(model, optimizer, steps=2)
        model[0].requires_grad_(True)
        train(model, optimizer, steps=3)

    assert_equal(plain[0], mine[0])


def test_a_parameter_without_a_gradient_does_not_change() -> None:
    """A gradient of zeros would let weight decay and momentum change it."""
    plain, mine = both(
        perceptron(), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1)
    )

    for model, optimizer in (plain, mine):
        train(model, optimizer, steps=2)
        for x, y in data(2):
            F.mse_loss(model(x), y).backward()
            model[2].bias.grad = None
            optimizer.step()
            optimizer.zero_grad()

    assert_equal(plain[0], mine[0])


def test_several_dtypes_and_odd_shapes() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Parameter(torch.ones(3, 5, dtype=torch.float64))
            self.scalar = nn.Parameter(torch.tensor(2.0))
            self.low = nn.Parameter(torch.ones(7, dtype=torch.bfloat16))
            self.empty = nn.Parameter(torch.empty(0, 4))
            self.register_buffer("flags", torch.tensor([True, False]))

        def forward(self, x: Tensor) -> Tensor:
            return x[:, :2] * self.scalar * self.wide.sum() * self.low.sum() + self.empty.sum()

    plain, mine = both(Odd(), OPTIMIZERS["sgd"])

    train(*plain, steps=2)
    train(*mine, steps=2)

    assert_equal(plain[0], mine[0])


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_scripted_model_trains() -> None:
    plain, _ = both(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)), sgd)
    scripted = torch.jit.script(copy.deepcopy(plain[0]))
    mine = scripted, Job(LocalClient()).optimizer(sgd(scripted.parameters()), scripted)

    train(*plain)
    train(*mine)

    assert_equal(plain[0], mine[0])


class ReplacedBuffer(nn.Module):
    """Model that replaces its buffer at every step instead of changing it in place."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        out: Tensor = self.linear(x - self.mean)
        return out


def test_a_buffer_that_the_model_replaces_is_still_pushed() -> None:
    plain, mine = both(ReplacedBuffer(), sgd)

    train(*plain)
    train(*mine)

    assert_equal(plain[0], mine[0])
    mine[0](data(1)[0][0])
    mine[1].model.pull()
    assert_equal(plain[0], mine[0])


def test_a_parameter_whose_storage_the_script_replaces_is_still_trained() -> None:
    """cudnn's flatten_parameters and changes of the memory format do this."""
    plain, mine = both(perceptron(), sgd)

    train(*plain, steps=2)
    train(*mine, steps=2)
    mine[0][0].weight.data = mine[0][0].weight.data.clone()
    train(*plain, steps=2)
    train(*mine, steps=2)

    assert_equal(plain[0], mine[0])


@pytest.mark.parametrize(
    "share", [nn.Module.share_memory, nn.Module.state_dict], ids=["share_memory", "queue"]
)
def test_a_model_that_is_shared_with_other_processes_is_still_trained(
    share: Callable[[nn.Module], Any],
) -> None:
    """torch then moves the storages, also when it sends tensors through a queue."""
    plain, mine = both(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)), sgd)

    train(*plain, steps=2)
    train(*mine, steps=2)
    shared = share(mine[0])
    for tensor in shared.values() if isinstance(shared, dict) else ():
        ForkingPickler.dumps(tensor)
    train(*plain, steps=2)
    train(*mine, steps=2)

    assert_equal(plain[0], mine[0])


def test_a_model_that_was_cast_is_refused() -> None:
    model = perceptron()
    optimizer = Job(LocalClient()).optimizer(sgd(model.parameters()), model)
    model.double()

    with pytest.raises(InvalidRequestError, match=r"0\.weight .*float64.*before job\.optimizer"):
        optimizer.step()


def test_sparse_gradients_are_refused_by_name() -> None:
    model = nn.Embedding(5, 2)
    optimizer = Job(LocalClient()).optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    F.embedding(torch.tensor([1]), model.weight, sparse=True).sum().backward()

    with pytest.raises(InvalidRequestError, match="weight has a sparse gradient"):
        optimizer.step()


@pytest.mark.cuda
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU on this machine"
)
def test_a_model_on_a_gpu_trains_there() -> None:
    plain, mine = both(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)), sgd)
    model = mine[0].to("cuda")
    optimizer = Job(LocalClient()).optimizer(sgd(model.parameters()), model)

    train(*plain)
    for x, y in data(5):
        F.mse_loss(model(x.cuda()), y.cuda()).backward()
        optimizer.step()
        optimizer.zero_grad()

    assert all(p.is_cuda for p in model.parameters())
    for name, tensor in plain[0].state_dict().items():
        torch.testing.assert_close(model.state_dict()[name].cpu(), tensor, rtol=1e-4, atol=1e-5)
