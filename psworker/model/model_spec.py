"""The description of a torch model for the servers, and the models that they cannot train."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pscommon.core.errors import InvalidRequestError
from pscommon.core.model_spec import (
    FLOATING,
    ITEMSIZE,
    TREATMENTS,
    InvalidModelError,
    ModelSpec,
    Optimizers,
    OptimizerSettings,
    Role,
    TensorSpec,
    Treatment,
)
from pscommon.optim.specs import spec_of

LOCAL_BUFFER = "with register_buffer(..., persistent=False) a buffer stays on its worker"
"""Remedy for a buffer that the servers cannot store."""

NORMS = nn.modules.batchnorm._NormBase
"""The base of all batch-norm and instance-norm modules of torch."""


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
        treatments: Treatment of buffers and frozen parameters, by pattern of their names in the
            optimizer's model.
    """

    settings: OptimizerSettings
    groups: Sequence[Sequence[Tensor]]
    treatments: Mapping[str, Treatment] = {}

    @staticmethod
    def of(
        optimizer: torch.optim.Optimizer,
        clip_norm: float | None = None,
        buffers: Mapping[str, Treatment] | None = None,
    ) -> "OptimizerMembers":
        """Return a torch optimizer as it is now.

        Raises InvalidRequestError if `buffers` is no mapping of patterns to treatments.
        """
        return OptimizerMembers(
            replace(spec_of(optimizer), clip_norm=clip_norm),
            [list(group["params"]) for group in optimizer.param_groups],
            _checked_treatments({} if buffers is None else buffers),
        )


def _checked_treatments(buffers: object) -> Mapping[str, Treatment]:
    if not isinstance(buffers, Mapping) or not all(isinstance(key, str) for key in buffers):
        raise InvalidRequestError(
            f"job.optimizer failed: buffers={buffers!r} is no mapping of patterns to treatments. "
            'Try: buffers={"teacher.*": "first"}'
        )
    for pattern, treatment in buffers.items():
        if treatment not in TREATMENTS:
            raise InvalidRequestError(
                f"job.optimizer failed: buffers={{{pattern!r}: {treatment!r}}} is no treatment. "
                'Try: "average" or "first"'
            )
    return dict(buffers)


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
    treatments = _Treatments(model, optimizers)
    specs = []
    for name, tensor in tensors.items():
        _check_tensor(name, tensor, id(tensor) in buffers)
        role: Role = "trainable" if id(tensor) in groups else "frozen"
        names = (name, *aliases.get(name, ()))
        chosen = treatments.chosen(names) if role == "frozen" else None
        if chosen is not None or id(tensor) in buffers:
            role = "buffer"
        dtype = str(tensor.dtype).removeprefix("torch.")
        treatment = None
        if role == "buffer":
            treatment = treatments.of_buffer(names, dtype, chosen)
        group, shape = groups.get(id(tensor), 0), tuple(tensor.shape)
        specs.append(TensorSpec(name, shape, dtype, role, group, names[1:], treatment))
    treatments.check_used()
    settings = {name: each.settings for name, each in optimizers.items()}
    return _make_spec(tuple(specs), settings.get("", settings))


class _Treatments:
    """The treatments of a model's buffers: those that the script chose, and the default."""

    def __init__(self, model: nn.Module, optimizers: Mapping[str, OptimizerMembers]) -> None:
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._chosen = {
            (f"{name}." if name else "", pattern): treatment
            for name, each in optimizers.items()
            for pattern, treatment in each.treatments.items()
        }
        self._unused = set(self._chosen)

    def chosen(self, names: Sequence[str]) -> Treatment | None:
        """Return the treatment of the first pattern that matches; None without one."""
        found = [
            (key, treatment)
            for key, treatment in self._chosen.items()
            for prefix, pattern in [key]
            if any(
                name.startswith(prefix) and fnmatchcase(name.removeprefix(prefix), pattern)
                for name in names
            )
        ]
        self._unused -= {key for key, _ in found}
        return found[0][1] if found else None

    def of_buffer(
        self, names: Sequence[str], dtype: str, chosen: Treatment | None
    ) -> Treatment | None:
        """Return the treatment of a tensor that travels as a buffer; None if it is no float."""
        if dtype not in FLOATING:
            if chosen == "average":
                raise InvalidRequestError(
                    f"job.optimizer failed: {names[0]} has dtype {dtype}, which has no average. "
                    'Try: "first"'
                )
            return None
        is_norm = any(
            isinstance(self._modules.get(name.rpartition(".")[0]), NORMS) for name in names
        )
        return chosen or ("average" if is_norm else "first")

    def check_used(self) -> None:
        """Raise InvalidRequestError for a pattern that has matched nothing."""
        for _, pattern in sorted(self._unused):
            raise InvalidRequestError(
                f"job.optimizer failed: buffers={{{pattern!r}: ...}} matches neither a persistent "
                "buffer nor a frozen parameter. Try: a name in model.state_dict() that the "
                "optimizer does not train"
            )


def _check_tensor(name: str, tensor: Tensor, is_buffer: bool) -> None:
    """Raise InvalidRequestError for a tensor that the servers cannot store."""
    if nn.parameter.is_lazy(tensor):
        raise InvalidRequestError(
            f"{name} has no shape yet: its module is lazy. Try: run a batch through the model "
            "before job.optimizer"
        )
    what, local = ("buffer", f"; {LOCAL_BUFFER}") if is_buffer else ("parameter", "")
    if tensor.layout is not torch.strided:
        raise InvalidRequestError(
            f"{what} {name} is sparse ({tensor.layout}), which servers cannot store. Try: a dense "
            f"tensor{local}"
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    if is_buffer and dtype not in ITEMSIZE:
        raise InvalidRequestError(
            f"buffer {name} has dtype {dtype}, which servers cannot store. Try: another dtype"
            f"{local}"
        )


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
    spans = sorted(
        (*_span(tensor), name)
        for name, tensor in tensors.items()
        if tensor.layout is torch.strided and tensor.numel()
    )
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
