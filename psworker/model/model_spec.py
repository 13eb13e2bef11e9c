"""The description of a torch model for the servers, and the models that they cannot train."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pscommon.core.errors import InvalidRequestError
from pscommon.core.model_spec import (
    ITEMSIZE,
    InvalidModelError,
    ModelSpec,
    Optimizers,
    OptimizerSettings,
    Role,
    TensorSpec,
)
from pscommon.optim.specs import spec_of

LOCAL_BUFFER = "with register_buffer(..., persistent=False) a buffer stays on its worker"
"""Remedy for a buffer that the servers cannot store."""


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that are saved with the model, each under its first name."""
    # not by the keys of state_dict(): a model may rename those
    found: dict[int, tuple[str, Tensor]] = {}
    for name, buffer in _all_persistent(model):
        found.setdefault(id(buffer), (name, buffer))
    return dict(found.values())


def _all_persistent(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    local = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name not in local:
            yield name, buffer


def _aliases(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, ...]]:
    """Return the further names of tied tensors, by first name."""
    first = {id(tensor): name for name, tensor in tensors.items()}
    found: dict[str, tuple[str, ...]] = {}
    for name, tensor in chain(
        model.named_parameters(remove_duplicate=False), _all_persistent(model)
    ):
        if (known := first.get(id(tensor))) is not None and known != name:
            found[known] = (*found.get(known, ()), name)
    return found


class OptimizerMembers(NamedTuple):
    """An optimizer, and the parameters that it updates.

    Attributes:
        settings: Its class and hyper-parameters, as the job registers them.
        groups: The parameters of each parameter group.
    """

    settings: OptimizerSettings
    groups: Sequence[Sequence[Tensor]]

    @staticmethod
    def of(optimizer: torch.optim.Optimizer, clip_norm: float | None = None) -> "OptimizerMembers":
        """Return a torch optimizer as it is now.

        clip_norm: Largest L2 norm of an update's averaged gradient; None: no limit.
        """
        return OptimizerMembers(
            replace(spec_of(optimizer), clip_norm=clip_norm),
            [list(group["params"]) for group in optimizer.param_groups],
        )


def describe_model(
    model: nn.Module, tensors: Mapping[str, Tensor], optimizers: Mapping[str, OptimizerMembers]
) -> ModelSpec:
    """Return the spec of a model for the servers.

    Args:
        model: The model.
        tensors: Its parameters and persistent buffers by name.
        optimizers: Decide which parameters are trainable, and in which group. By name; the name
            of a single one is empty.

    Raises:
        InvalidRequestError: The servers cannot train this model.
    """
    optimizers = dict(sorted(optimizers.items()))
    all_groups = [group for each in optimizers.values() for group in each.groups]
    groups = {id(p): index for index, group in enumerate(all_groups) for p in group}
    buffers = {id(buffer) for buffer in model.buffers()}
    aliases = _aliases(model, tensors)
    for name, each in optimizers.items():
        _check_parameters(name, each, {id(tensor) for tensor in tensors.values()})
    _refuse_embeddings(model, groups.keys())
    specs = []
    for name, tensor in tensors.items():
        if nn.parameter.is_lazy(tensor):
            raise InvalidRequestError(
                f"{name} has no shape yet: its module is lazy. Try: run a batch through the model "
                "before job.optimizer"
            )
        role: Role = (
            "trainable" if id(tensor) in groups else "buffer" if id(tensor) in buffers else "frozen"
        )
        dtype = str(tensor.dtype).removeprefix("torch.")
        if role == "buffer" and dtype not in ITEMSIZE:
            raise InvalidRequestError(
                f"buffer {name} has dtype {dtype}, which servers cannot store. Try: another dtype; "
                f"{LOCAL_BUFFER}"
            )
        group, shape = groups.get(id(tensor), 0), tuple(tensor.shape)
        specs.append(TensorSpec(name, shape, dtype, role, group, aliases.get(name, ())))
    settings = {name: each.settings for name, each in optimizers.items()}
    return _make_spec(tuple(specs), settings.get("", settings))


def _make_spec(tensors: tuple[TensorSpec, ...], optimizer: Optimizers) -> ModelSpec:
    try:
        return ModelSpec(tensors, optimizer)
    except (InvalidModelError, KeyError) as error:
        raise InvalidRequestError(f"the servers cannot train this model: {error}") from error


def _check_parameters(name: str, optimizer: OptimizerMembers, known: set[int]) -> None:
    label = f"optimizer {name}" if name else "the optimizer"
    for index, group in enumerate(optimizer.groups):
        for number, parameter in enumerate(group):
            if id(parameter) not in known:
                raise InvalidRequestError(
                    f"parameter {number} of {label}'s group {index}, shape "
                    f"{list(parameter.shape)}, is not in the model. Try: give job.optimizer the "
                    "model whose parameters the optimizer was made from"
                )


def _refuse_embeddings(model: nn.Module, trainable: Collection[int]) -> None:
    for name, module in model.named_modules():
        if (
            not isinstance(module, nn.Embedding | nn.EmbeddingBag)
            or id(module.weight) not in trainable
        ):
            continue
        layer = name or type(module).__name__
        if module.max_norm is not None:
            raise InvalidRequestError(
                f"{layer} has max_norm, which changes weights in place at each forward, but the "
                "job's weights are on the servers. Try: make it without max_norm, and bound its "
                "output"
            )
        if module.sparse and module.weight.requires_grad:
            raise InvalidRequestError(
                f"{layer} makes sparse gradients, which servers do not support. Try: make it with "
                "sparse=False"
            )


def check_separate(model: nn.Module, moved: Mapping[str, Tensor]) -> None:
    """Raise InvalidRequestError if a tensor of `moved` overlaps another one in memory.

    Each tensor gets its own byte range of the flat buffer, which would separate them.
    """
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    spans = sorted((*_span(tensor), name) for name, tensor in tensors.items() if tensor.numel())
    reached, last = 0, ""
    for start, stop, name in spans:
        if start < reached and (name in moved or last in moved):
            raise InvalidRequestError(
                f"{last} and {name} lie in the same memory, and would be separated. Try: tie the "
                "Parameter itself (m[1].weight = m[0].weight), or give each its own copy"
            )
        if stop > reached:
            reached, last = stop, name


def _span(tensor: Tensor) -> tuple[int, int]:
    last = sum((side - 1) * step for side, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def only_device(tensors: Mapping[str, Tensor]) -> torch.device:
    """Return the device of all tensors.

    Raises:
        InvalidRequestError: They are on several devices, or on neither CPU nor CUDA device.
    """
    devices = {tensor.device for tensor in tensors.values()}
    if len(devices) != 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        names = ", ".join(sorted(map(str, devices)))
        raise InvalidRequestError(
            f"the model is not on one device, but on {names}. Try: model.to(job.device) before "
            "job.optimizer"
        )
    return devices.pop()
