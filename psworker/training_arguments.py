"""The arguments of `train_distributed`: model, data, loss and optimizer in several forms.

All functions raise InvalidRequestError for an argument that does not fit.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pscommon.core.errors import InvalidRequestError
from pscommon.optim import KINDS

Loss = Callable[[Any, Any], Tensor]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def make_module(model: nn.Module | str) -> nn.Module:
    """Return the model, or the result of the function that "package.module:function" names."""
    if isinstance(model, nn.Module):
        return model
    if not isinstance(model, str):
        raise InvalidRequestError(
            f"model cannot be a {type(model).__name__}. Try: a torch.nn.Module, or "
            '"package.module:function"'
        )
    name, _, function = model.partition(":")
    try:
        if not name or not function:
            raise ImportError("module or function is missing")
        make = getattr(importlib.import_module(name), function)
    except (ImportError, AttributeError) as error:
        raise InvalidRequestError(
            f'model {model!r} is not valid: {error}. Try: "package.module:function"'
        ) from error
    module = make()
    if not isinstance(module, nn.Module):
        raise InvalidRequestError(
            f"{model} made a {type(module).__name__}. Try: a function that returns a "
            "torch.nn.Module"
        )
    return module


def check_data(data: Any) -> Any:
    """Return the data set; a list of two tensors becomes a tuple, which has rows."""
    if isinstance(data, DataLoader):
        raise InvalidRequestError(
            "data cannot be a DataLoader: each node makes its own batches. Try: its data set "
            "(loader.dataset), with batch_size and shuffle as arguments"
        )
    is_list = isinstance(data, list) and data and all(isinstance(item, Tensor) for item in data)
    if not is_list and not isinstance(data, tuple):
        return data
    if len(data) != 2:
        raise InvalidRequestError(
            f"data has {len(data)} tensors. Try: a pair of tensors (inputs, targets), or a data set"
        )
    return tuple(data)


def optimizer_maker(
    optimizer: MakeOptimizer | torch.optim.Optimizer | None, module: nn.Module
) -> MakeOptimizer:
    """Return a function that makes the optimizer of a node from the parameters of its model.

    Args:
        optimizer: Such a function, an optimizer over parameters of `module` whose settings are
            used, or None for Adam.
        module: The model that the nodes copy.
    """
    if optimizer is None:
        return torch.optim.Adam
    if not isinstance(optimizer, torch.optim.Optimizer):
        return _checked_maker(optimizer)
    numbers = {id(parameter): number for number, parameter in enumerate(module.parameters())}
    groups = [
        (
            {key: value for key, value in group.items() if key != "params"},
            [numbers.get(id(p)) for p in group["params"]],
        )
        for group in optimizer.param_groups
    ]
    if any(number is None for _, members in groups for number in members):
        raise InvalidRequestError(
            "the optimizer has parameters that are not the model's. Try: make it from "
            "model.parameters()"
        )
    kinds = [kind for kind in KINDS.values() if kind.torch_class is type(optimizer)]
    arguments = {key: optimizer.defaults[key] for kind in kinds for key in kind.constructor_only}

    def make(parameters: Any) -> torch.optim.Optimizer:
        copied = list(parameters)
        optimizer_class: Any = type(optimizer)
        copied_groups = [
            settings | {"params": [copied[number] for number in members if number is not None]}
            for settings, members in groups
        ]
        result: torch.optim.Optimizer = optimizer_class(copied_groups, **arguments)
        return result

    return make


def _checked_maker(make: MakeOptimizer) -> MakeOptimizer:
    remedy = "Try: a torch.optim optimizer, or a function that makes one, such as torch.optim.SGD"
    if not callable(make):
        raise InvalidRequestError(f"optimizer cannot be {make!r}. {remedy}")

    def checked(parameters: Any) -> torch.optim.Optimizer:
        optimizer: Any = make(parameters)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InvalidRequestError(f"optimizer made a {type(optimizer).__name__}. {remedy}")
        return optimizer

    return checked


def check_loss(loss: Loss | None) -> Loss:
    """Return the loss, or the default one for None."""
    if loss is None:
        return _default_loss
    if isinstance(loss, type) or not callable(loss):
        raise InvalidRequestError(
            f"loss cannot be {loss!r}. Try: a function of output and target, such as "
            "torch.nn.MSELoss()"
        )
    return loss


def _default_loss(output: Any, target: Any) -> Tensor:
    if not isinstance(output, Tensor) or not isinstance(target, Tensor):
        raise InvalidRequestError(
            f"there is no default loss for a {type(output).__name__} and a "
            f"{type(target).__name__}. Try: loss=..., or a model and targets that are tensors"
        )
    if target.is_floating_point():
        return nn.functional.mse_loss(output, target)
    return nn.functional.cross_entropy(output, target)
