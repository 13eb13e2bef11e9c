"""Which models a job accepts, which of their tensors it trains, and what it refuses."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pscommon.core.errors import InvalidRequestError, UnsupportedOptimizerError
from psworker.client.local_client import LocalClient
from psworker.job import Job


def sgd(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def test_only_persistent_buffers_belong_to_the_job() -> None:
    model = perceptron()
    model.register_buffer("kept", torch.zeros(2))
    model.register_buffer("cache", torch.zeros(3), persistent=False)
    client = LocalClient()

    Job(client).optimizer(sgd(model.parameters()), model)

    assert [t.name for t in client.plan.spec.tensors if t.role == "buffer"] == ["kept"]


def test_a_buffer_that_is_persistent_under_any_of_its_names_belongs_to_the_job() -> None:
    model, client, shared = perceptron(), LocalClient(), torch.zeros(2)
    model.register_buffer("cache", shared, persistent=False)
    model.register_buffer("kept", shared)
    model.register_buffer("again", shared)

    Job(client).optimizer(sgd(model.parameters()), model)

    assert [t.name for t in client.plan.spec.tensors if t.role == "buffer"] == ["kept"]


class Renaming(nn.Module):
    """Model whose state_dict omits the prefix of its inner module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(2)
        self.inner.register_buffer("cache", torch.zeros(3), persistent=False)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {
            name.removeprefix("inner."): tensor for name, tensor in super().state_dict().items()
        }


def test_a_model_may_override_state_dict() -> None:
    model, client = Renaming(), LocalClient()

    Job(client).optimizer(sgd(model.parameters()), model)

    buffers = [t.name for t in client.plan.spec.tensors if t.role == "buffer"]
    assert buffers == ["inner.running_mean", "inner.running_var", "inner.num_batches_tracked"]


def shared_weight(model: nn.Sequential) -> str:
    model[2].weight.data = model[0].weight.data[:2]
    return r"0\.weight and 2\.weight|2\.weight and 0\.weight"


def buffer_of_a_weight(model: nn.Sequential) -> str:
    model.register_buffer("view", model[2].weight.detach()[1])
    return r"2\.weight and view"


def local_view(model: nn.Sequential) -> str:
    model.register_buffer("view", model[2].weight.detach(), persistent=False)
    return r"2\.weight and view|view and 2\.weight"


@pytest.mark.parametrize("share", [shared_weight, buffer_of_a_weight, local_view])
def test_tensors_in_the_same_memory_are_refused_by_name(
    share: Callable[[nn.Sequential], str],
) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    names = share(model)

    with pytest.raises(InvalidRequestError, match=rf"({names}) lie in the same memory"):
        Job(LocalClient()).optimizer(sgd(model.parameters()), model)


def test_adjacent_tensors_in_one_storage_are_accepted() -> None:
    """cudnn lays out the weights of an RNN like this; a model may do so with its buffers."""
    flat, model = torch.randn(24), nn.ParameterList([nn.Parameter(torch.empty(0))])
    for first in (0, 12):
        model.append(nn.Parameter(flat[first : first + 12].view(3, 4).T))
        model.register_buffer(f"own{first}", flat.new_zeros(3).expand(2, 3), persistent=False)
    cache = torch.zeros(4)
    model.register_buffer("one", cache, persistent=False)
    model.register_buffer("other", cache[1:], persistent=False)

    Job(LocalClient()).optimizer(sgd(model.parameters()), model)


def test_a_parameter_outside_the_model_is_refused_by_position() -> None:
    model, stranger = perceptron(), nn.Linear(7, 3)

    with pytest.raises(
        InvalidRequestError, match=r"parameter 1 of the optimizer's group 0, shape \[3, 7\]"
    ):
        Job(LocalClient()).optimizer(sgd([model[0].weight, stranger.weight]), model)


def test_an_unsupported_optimizer_is_refused() -> None:
    model = perceptron()

    with pytest.raises(UnsupportedOptimizerError, match=r"LBFGS: .*several times.*AdamW"):
        Job(LocalClient()).optimizer(torch.optim.LBFGS(model.parameters()), model)


def test_an_optimizer_whose_step_was_replaced_is_refused() -> None:
    """The wrapper that an LR scheduler installs is accepted."""
    model = perceptron()
    optimizer = sgd(model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    Job(LocalClient()).optimizer(optimizer, model)

    optimizer = sgd(model.parameters())
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    with pytest.raises(InvalidRequestError, match=r"step\(\) was replaced.*register_step_pre_hook"):
        Job(LocalClient()).optimizer(optimizer, model)


def test_a_complex_model_is_refused() -> None:
    model = nn.Linear(2, 2, dtype=torch.complex64)

    with pytest.raises(InvalidRequestError, match="complex64"):
        Job(LocalClient()).optimizer(sgd(model.parameters()), model)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_lazy_model_is_refused() -> None:
    model = nn.LazyLinear(3)

    with pytest.raises(InvalidRequestError, match="weight has no shape yet"):
        Job(LocalClient()).optimizer(sgd(model.parameters()), model)


def test_a_model_on_the_meta_device_is_refused() -> None:
    model = nn.Linear(2, 2, device="meta")

    with pytest.raises(InvalidRequestError, match="not on one device, but on meta"):
        Job(LocalClient()).optimizer(sgd(model.parameters()), model)


@pytest.mark.parametrize(
    "module", [nn.Embedding(4, 3, sparse=True), nn.EmbeddingBag(4, 3, sparse=True)]
)
def test_a_trained_layer_with_sparse_gradients_is_refused(module: nn.Module) -> None:
    model = nn.ModuleDict({"words": module, "linear": nn.Linear(3, 1)})
    with pytest.raises(
        InvalidRequestError, match=r"words makes sparse gradients.*: make it with sparse=False"
    ):
        Job(LocalClient()).optimizer(sgd(model.parameters()), model)

    Job(LocalClient()).optimizer(sgd(model["linear"].parameters()), model)
    module.requires_grad_(False)
    Job(LocalClient()).optimizer(sgd(model.parameters()), model)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16])
def test_a_buffer_of_an_unsupported_dtype_is_refused_with_a_remedy(dtype: torch.dtype) -> None:
    model = perceptron()
    model.register_buffer("odd", torch.zeros(2, dtype=dtype))

    with pytest.raises(
        InvalidRequestError, match=rf"buffer odd.*{str(dtype)[6:]}.*persistent=False"
    ):
        Job(LocalClient()).optimizer(sgd(model.parameters()), model)


def grown(model: nn.Module) -> None:
    model.seen = torch.zeros(3)


def removed(model: nn.Module) -> None:
    model.seen = None


def deleted(model: nn.Module) -> None:
    del model.seen


@pytest.mark.parametrize("change", [grown, removed, deleted])
def test_a_resized_or_removed_buffer_is_refused_with_a_remedy(
    change: Callable[[nn.Module], None],
) -> None:
    model = perceptron()
    model.register_buffer("seen", torch.zeros(2))
    optimizer = Job(LocalClient()).optimizer(sgd(model.parameters()), model)
    change(model)

    with pytest.raises(InvalidRequestError, match=r"^seen has changed.*persistent=False"):
        optimizer.step()


@pytest.mark.parametrize("own", [torch.ones(3), np.ones(3)], ids=["tensor", "array"])
def test_a_group_may_contain_values_of_the_script(own: Any) -> None:
    model = perceptron()
    optimizer = Job(LocalClient()).optimizer(sgd(model.parameters()), model)

    for factor in (1, 2):
        optimizer.param_groups[0]["scales"] = own * factor
        optimizer.step()

    assert optimizer.result is not None
    assert optimizer.result.version == 2


def emptied(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"] = []


def moved(optimizer: torch.optim.Optimizer) -> None:
    first, second = (group["params"] for group in optimizer.param_groups)
    first.append(second.pop())


def removed(optimizer: torch.optim.Optimizer) -> None:
    del optimizer.param_groups[1]


def replaced(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups = [group | {"lr": 1.0} for group in optimizer.param_groups]


@pytest.mark.parametrize("change", [emptied, moved, removed, replaced])
@pytest.mark.parametrize("handed_over", [False, True])
def test_changed_parameter_groups_are_refused_with_a_remedy(
    change: Callable[[torch.optim.Optimizer], None], handed_over: bool
) -> None:
    """Through the original optimizer or the one of the job. Hyper-parameters may change."""
    model = perceptron()
    plain = torch.optim.SGD(
        [{"params": layer.parameters()} for layer in (model[0], model[2])], lr=0.1
    )
    optimizer = Job(LocalClient()).optimizer(plain, model)
    optimizer.param_groups[0]["lr"] = 0.2
    optimizer.step()
    change(plain if handed_over else optimizer)
    model(torch.ones(1, 4)).sum().backward()
    before = [parameter.detach().clone() for parameter in model.parameters()]

    with pytest.raises(
        InvalidRequestError, match=r"parameters of a group are fixed.*requires_grad"
    ):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("samples", [0, -3, 2.5, True, "2"])
def test_samples_must_be_a_positive_integer(samples: Any) -> None:
    model = perceptron()
    optimizer = Job(LocalClient()).optimizer(sgd(model.parameters()), model)

    with pytest.raises(InvalidRequestError, match=f"samples={samples!r}: .* at least 1"):
        optimizer.step(samples=samples)
    optimizer.step(samples=np.int64(2))

    assert optimizer.result is not None
    assert optimizer.result.version == 1
