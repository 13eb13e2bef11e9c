"""What `train_distributed` is given: a model, a loss and an optimizer in several forms."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pscommon.core.errors import InvalidRequestError
from pscommon.optim.specs import SUPPORTED

Loss = Callable[[Any, Any], Tensor]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def made_module(model: nn.Module | str) -> nn.Module:
    """The model, or what the named function makes. InvalidRequestError where that is no module."""
    if isinstance(model, nn.Module):
        return model
    if not isinstance(model, str):
        raise InvalidRequestError(
            f"a model is a torch.nn.Module or a text, not a {type(model).__name__}"
        )
    name, _, function = model.partition(":")
    try:
        if not name or not function:
            raise ImportError("one of them is missing")
        make = getattr(importlib.import_module(name), function)
    except (ImportError, AttributeError) as error:
        raise InvalidRequestError(
            f'model {model!r} is not "package.module:function": {error}'
        ) from error
    made = make()
    if not isinstance(made, nn.Module):
        raise InvalidRequestError(f"{model} made a {type(made).__name__}, not a torch.nn.Module")
    return made


def optimizer_maker(
    optimizer: MakeOptimizer | torch.optim.Optimizer | None, module: nn.Module
) -> MakeOptimizer:
    """From what the user gave to a function that makes a node's optimizer."""
    if optimizer is None:
        return torch.optim.Adam
    if not isinstance(optimizer, torch.optim.Optimizer):
        return _checked_maker(optimizer)
    places = {id(parameter): place for place, parameter in enumerate(module.parameters())}
    groups = [
        (
            {key: value for key, value in group.items() if key != "params"},
            [places.get(id(p)) for p in group["params"]],
        )
        for group in optimizer.param_groups
    ]
    if any(place is None for _, members in groups for place in members):
        raise InvalidRequestError("the optimizer has parameters that are not the model's")
    kinds = [kind for kind in SUPPORTED.values() if kind.torch_class is type(optimizer)]
    arguments = {key: optimizer.defaults[key] for kind in kinds for key in kind.constructor_only}

    def make(parameters: Any) -> torch.optim.Optimizer:
        mine = list(parameters)
        make_one: Any = type(optimizer)
        chosen = [
            settings | {"params": [mine[p] for p in members if p is not None]}
            for settings, members in groups
        ]
        made: torch.optim.Optimizer = make_one(chosen, **arguments)
        return made

    return make


def _checked_maker(make: MakeOptimizer) -> MakeOptimizer:
    what = (
        "optimizer is one of torch.optim's, or makes one from parameters, such as torch.optim.SGD"
    )
    if not callable(make):
        raise InvalidRequestError(f"{what}, not {make!r}")

    def checked(parameters: Any) -> torch.optim.Optimizer:
        made: Any = make(parameters)
        if not isinstance(made, torch.optim.Optimizer):
            raise InvalidRequestError(f"{what}: this made a {type(made).__name__}")
        return made

    return checked


def checked_loss(loss: Loss | None) -> Loss:
    """The loss, or the default one. InvalidRequestError for what cannot be called."""
    if loss is None:
        return _default_loss
    if isinstance(loss, type) or not callable(loss):
        raise InvalidRequestError(
            f"loss is a function of output and target, such as torch.nn.MSELoss(), not {loss!r}"
        )
    return loss


def _default_loss(output: Any, target: Any) -> Tensor:
    if not isinstance(output, Tensor) or not isinstance(target, Tensor):
        raise InvalidRequestError(
            "without loss=... the model's output and the target are tensors, not a "
            f"{type(output).__name__} and a {type(target).__name__}"
        )
    if target.is_floating_point():
        return nn.functional.mse_loss(output, target)
    return nn.functional.cross_entropy(output, target)
