"""Between a torch model and the job's tape: which tensors there are, where they lie, and how bytes get in and out.

On the CPU the model's parameters and buffers become views of the tape that the client sends from and receives into:
pulling moves no tensor. On a GPU they become views of a tape there, and one copy each way through pinned memory joins
it to the tape on the host.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pscommon.core.errors import InvalidRequestError
from pscommon.core.model import InvalidModelError, ModelSpec, OptimizerSpec, Role, TensorSpec
from pscommon.core.tape import Plan, Range
from pscommon.optimizers import spec_of


class Tape:
    """`nbytes` zeroed bytes on `device`, with a twin in host memory that the client works on (the same on the CPU)."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.near = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        pinned = device.type != "cpu"
        self.host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True) if pinned else self.near
        self.memory = self.host.numpy().data

    def view(self, extent: Range, tensor: TensorSpec) -> Tensor:
        """The tensor's bytes beside the model, typed and shaped.

        As a storage of its own: torch.save writes whole storages, and refuses one that has tensors of several dtypes.
        """
        storage = self.near.untyped_storage()[extent.start : extent.stop]
        flat = torch.empty(0, dtype=_dtype(tensor.dtype), device=self.near.device).set_(storage)
        return flat.view(tensor.shape)

    def to_host(self, stop: int) -> None:
        """Bytes [0, stop) from beside the model; they are there when this returns."""
        if self.near is not self.host:
            self.host[:stop].copy_(self.near[:stop], non_blocking=True)
            torch.cuda.current_stream(self.near.device).synchronize()

    def from_host(self, stop: int) -> None:
        """Bytes [0, stop) to the model; what it computes next sees them, and the host's may change at once."""
        if self.near is not self.host:
            self.near[:stop].copy_(self.host[:stop], non_blocking=True)
            torch.cuda.current_stream(self.near.device).synchronize()


@dataclass(frozen=True, slots=True)
class _Place:
    """A trainable parameter or a buffer (`owner.key`), and where it lies. weight is a view of the weights' tape."""

    index: int
    name: str
    tensor: Tensor
    weight: Tensor
    gradient: Tensor
    owner: nn.Module
    key: str


class Bridge:
    """One model on one tape. Made in two steps: `spec` goes to the servers, the plan that they answer to `attach`.

    Parameters of the optimizer are trainable, also those whose requires_grad is False at the moment; the model's other
    parameters are frozen; persistent buffers are buffers, others stay local. A tied tensor counts once, by its first
    name. Raises InvalidRequestError for a model that cannot be trained this way.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self._tensors: dict[str, Tensor] = dict(model.named_parameters()) | _persistent_buffers(model)
        self.spec = _model_spec(model, self._tensors, optimizer)
        self.device = _only_device(self._tensors)

    def attach(self, plan: Plan) -> None:
        """Moves the model onto the tape, values and all. Parameters stay the same objects; only their storage moves."""
        self.weights, self.gradients = (Tape(plan.nbytes, self.device) for _ in range(2))
        self._places: dict[Role, list[_Place]] = {"trainable": [], "buffer": [], "frozen": []}
        for index, spec in enumerate(plan.spec.tensors):
            place = self._place(plan.extent(index), index, spec)
            place.weight.copy_(place.tensor.detach())
            place.tensor.data = place.weight
            self._places[spec.role].append(place)
        self._buffers = plan.section("buffer")
        self._travels = self._buffers.stop
        self.weights.to_host(plan.nbytes)

    def _place(self, extent: Range, index: int, spec: TensorSpec) -> _Place:
        owner, _, key = spec.name.rpartition(".")
        weight, gradient = (tape.view(extent, spec) for tape in (self.weights, self.gradients))
        module = self._model.get_submodule(owner)
        return _Place(index, spec.name, self._tensors[spec.name], weight, gradient, module, key)

    def gather(self) -> frozenset[int]:
        """Gradients and buffers onto the gradients' tape. Returns the trainable tensors that have no gradient."""
        self.reattach()
        present = [place for place in self._places["trainable"] if place.tensor.grad is not None]
        gradients = [_dense_gradient(place) for place in present]
        if present:
            torch._foreach_copy_([place.gradient for place in present], gradients)
        start, stop = self._buffers
        self.gradients.near[start:stop].copy_(self.weights.near[start:stop])
        self.gradients.to_host(self._travels)
        return frozenset(place.index for place in self._places["trainable"]) - {place.index for place in present}

    def scatter(self, everything: bool = False) -> None:
        """What the client wrote to the weights' tape, to the model; frozen tensors only with `everything`."""
        self.weights.from_host(len(self.weights.host) if everything else self._travels)

    def reattach(self) -> None:
        """Undoes what scripts and torch may do between steps: give a parameter or buffer other storage.

        To be called before the client writes to the weights' tape; `gather` does. A buffer's new values are kept.
        """
        for place in self._places["trainable"]:
            if place.tensor.data_ptr() != place.weight.data_ptr():
                _check_unchanged(place, place.tensor)
                place.tensor.data = place.weight
        for place in self._places["buffer"]:
            current = getattr(place.owner, place.key)
            if current is not place.tensor or current.data_ptr() != place.weight.data_ptr():
                _check_unchanged(place, current)
                place.weight.copy_(current.detach())
                place.tensor.data = place.weight
                setattr(place.owner, place.key, place.tensor)


def _persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    kept = model.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def _model_spec(model: nn.Module, tensors: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> ModelSpec:
    groups = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    buffers = {id(buffer) for buffer in model.buffers()}
    _check_all_known(optimizer, {id(tensor) for tensor in tensors.values()})
    specs = []
    for name, tensor in tensors.items():
        if nn.parameter.is_lazy(tensor):
            raise InvalidRequestError(f"{name} has no shape yet: run a batch through the model before job.optimizer")
        role: Role = "trainable" if id(tensor) in groups else "buffer" if id(tensor) in buffers else "frozen"
        dtype = str(tensor.dtype).removeprefix("torch.")
        specs.append(TensorSpec(name, tuple(tensor.shape), dtype, role, groups.get(id(tensor), 0)))
    return _checked(tuple(specs), spec_of(optimizer))


def _checked(tensors: tuple[TensorSpec, ...], optimizer: OptimizerSpec) -> ModelSpec:
    try:
        return ModelSpec(tensors, optimizer)
    except (InvalidModelError, KeyError) as error:
        raise InvalidRequestError(f"this model cannot be trained by the servers: {error}") from error


def _check_all_known(optimizer: torch.optim.Optimizer, known: set[int]) -> None:
    for index, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                raise InvalidRequestError(
                    f"parameter {place} of the optimizer's group {index}, shape {list(parameter.shape)}, is not in the "
                    "model: give job.optimizer the model whose parameters the optimizer was made from"
                )


def _only_device(tensors: Mapping[str, Tensor]) -> torch.device:
    devices = {tensor.device for tensor in tensors.values()}
    if len(devices) != 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        names = ", ".join(sorted(map(str, devices)))
        raise InvalidRequestError(f"a worker's model must be on one device, cpu or cuda; this one is on {names}")
    return devices.pop()


def _check_unchanged(place: _Place, current: Tensor) -> None:
    now, was = ((t.dtype, t.device, t.shape) if isinstance(t, Tensor) else t for t in (current, place.weight))
    if now != was:
        raise InvalidRequestError(
            f"{place.name} was {was} when job.optimizer took the model and is {now} now: "
            "move, cast and reshape the model before job.optimizer"
        )


def _dense_gradient(place: _Place) -> Tensor:
    gradient = place.tensor.grad
    assert gradient is not None
    if gradient.layout is not torch.strided:
        raise InvalidRequestError(f"{place.name} has a sparse gradient; make its layer with sparse=False")
    return gradient


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
