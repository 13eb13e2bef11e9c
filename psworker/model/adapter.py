"""Adapter between a torch model and the flat buffers of the client.

On the CPU, parameters and buffers become views of the memory that the client sends from and
receives into, so a pull copies no tensor. On a GPU they become views of a buffer on the device;
copies through pinned memory connect it to the host buffer.

Operations on thousands of tensors use lists built once and C loops (map, _foreach_copy_). A
Python loop would cost more than the copy itself; loops remain only on exceptional paths.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, compress, repeat
from operator import attrgetter, getitem, is_, is_not
from typing import Any

import torch
from torch import Tensor, nn

from pscommon.core.errors import InvalidRequestError
from pscommon.core.model_spec import (
    ITEMSIZE,
    InvalidModelError,
    ModelSpec,
    OptimizerSettings,
    Role,
    TensorSpec,
)
from pscommon.core.partition import ByteRange, PartitionPlan
from pscommon.optim.specs import spec_of
from pscommon.system.thread_team import ThreadTeam, cores
from psworker.model.change_detector import ChangeDetector
from psworker.model.flat_buffer import CudaBuffer, DoubleBuffer, FlatBuffer

MANY = 2048
"""Tensor count from which one torch call per tensor costs more than copying the bytes."""

OWN = "a buffer of register_buffer(..., persistent=False) stays on each worker"

_GRAD, _BUFFERS = attrgetter("grad"), attrgetter("_buffers")


class TensorGroup:
    """The tensors of one role in flat buffer order, as parallel lists.

    Attributes:
        indices: index of each tensor in the model spec
        names: name of each tensor
        extents: byte range of each tensor in the flat buffer
        tensors: the model's tensors
        weights: views of the weight buffer
        gradients: views of the gradient buffer; empty unless the role is "trainable"
        pointers: data addresses of `weights`
    """

    def __init__(
        self,
        plan: PartitionPlan,
        role: Role,
        tensors: Mapping[str, Tensor],
        weights: FlatBuffer,
        gradients: FlatBuffer,
    ) -> None:
        specs = plan.spec.tensors
        self._role = role
        self.indices = [index for index in plan.order if specs[index].role == role]
        self.names = [specs[index].name for index in self.indices]
        self.extents = [plan.extent(index) for index in self.indices]
        self.tensors = [tensors[name] for name in self.names]
        self._specs = [specs[index] for index in self.indices]
        self._tape = weights
        self.weights = list(map(weights.view, self.extents, self._specs))
        self.gradients = (
            list(map(gradients.view, self.extents, self._specs)) if role == "trainable" else []
        )
        self.pointers = list(map(Tensor.data_ptr, self.weights))

    def move_in(self) -> None:
        """Copy the values into the weight buffer and make the tensors views of it."""
        for tensor, weight in zip(self.tensors, self.weights, strict=True):
            weight.copy_(tensor.detach())
            tensor.data = weight

    def elsewhere(self) -> list[int]:
        """Return the places of tensors whose storage is no longer in the weight buffer.

        Raises:
            InvalidRequestError: The dtype, device or shape of such a tensor has changed.
        """
        pointers = list(map(Tensor.data_ptr, self.tensors))
        if pointers == self.pointers:
            return []
        moved = [place for place, pointer in enumerate(pointers) if pointer != self.pointers[place]]
        for place in moved:
            self.check_unchanged(place, self.tensors[place])
            if self.weights[place].data_ptr() != self.pointers[place]:
                # share_memory and torch's queues move the storage itself, and the view with it
                self.weights[place] = self._tape.view(self.extents[place], self._specs[place])
        return moved

    def check_unchanged(self, place: int, current: object) -> None:
        """Raise InvalidRequestError unless `current` has the same dtype, device and shape."""
        weight = self.weights[place]
        now, was = (
            (t.dtype, t.device, t.shape) if isinstance(t, Tensor) else t for t in (current, weight)
        )
        if now != was:
            raise InvalidRequestError(
                f"{self.names[place]} was {was} when job.optimizer took the model and is {now} "
                "now: move, cast and reshape the model before job.optimizer"
                + (f"; {OWN}" if self._role == "buffer" else "")
            )


class ModelAdapter:
    """Maps one model to a pair of flat buffers.

    Construction takes two steps: `spec` is sent to the servers, and `attach` receives the partition
    plan that they return.

    Roles: parameters of the optimizer are trainable, even with requires_grad False. The other
    parameters are frozen. Persistent buffers are buffers; non-persistent buffers stay local. A tied
    tensor counts once, under its first name.

    Attributes:
        spec: model spec for the servers
        device: device of all tensors
        gradients: flat buffer of gradients and outgoing buffers; set by `attach`
        weights: flat buffer of weights; set by `attach`
        moving: byte range that travels with every step
        buffer_range: byte range of the buffers
        changes: detector of in-place changes by the script

    Raises:
        InvalidRequestError: The servers cannot train this model.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, clip_norm: float | None = None
    ) -> None:
        self._model = model
        self._tensors: dict[str, Tensor] = dict(model.named_parameters()) | _persistent_buffers(
            model
        )
        self.spec = _model_spec(model, self._tensors, optimizer, clip_norm)
        self.device = _only_device(self._tensors)
        _refuse_shared(model, self._tensors)
        # a GPU batches the copies, and they must be on the stream of the script's thread
        self._team = ThreadTeam(min(2, cores()) if self.device.type == "cpu" else 1)

    def attach(
        self, plan: PartitionPlan, memory: tuple[memoryview, memoryview], apart: bool = False
    ) -> None:
        """Move the model into the flat buffers. Parameters stay the same objects with new storage.

        Args:
            plan: Partition plan from the servers.
            memory: The client's gradient and weight memory, plan.nbytes bytes each.
            apart: Keep the model's weights outside `memory`, so that new weights can arrive while
                the model computes.
        """
        self.buffer_range = plan.section("buffer")
        self.moving = ByteRange(0, self.buffer_range.stop)
        self._everything = ByteRange(0, plan.nbytes)
        self.gradients, self.weights = self._tapes(memory, apart)
        self.trainable, buffers, frozen = (
            TensorGroup(plan, role, self._tensors, self.weights, self.gradients)
            for role in ("trainable", "buffer", "frozen")
        )
        for places in (self.trainable, buffers, frozen):
            places.move_in()
        self._buffers = buffers
        modules = dict(self._model.named_modules())
        self._owners = [modules[name.rpartition(".")[0]] for name in buffers.names]
        self._keys = [name.rpartition(".")[2] for name in buffers.names]
        self.weights.to_host([self._everything]).synchronize()
        tape = self.weights.near[: plan.section("trainable").stop]
        trainable = self.trainable
        self.changes = ChangeDetector(
            trainable.names, trainable.indices, trainable.tensors, trainable.extents, tape
        )

    def _tapes(
        self, memory: tuple[memoryview, memoryview], apart: bool
    ) -> tuple[FlatBuffer, FlatBuffer]:
        if self.device.type == "cuda":
            # frozen tensors come last and have no gradients: leave them out to save GPU memory
            return CudaBuffer(memory[0], self.device, self.moving.stop), CudaBuffer(
                memory[1], self.device
            )
        return FlatBuffer(memory[0]), DoubleBuffer(memory[1]) if apart else FlatBuffer(memory[1])

    def gather(self) -> frozenset[int]:
        """Copy gradients and buffers into the gradient buffer.

        Returns:
            Spec indices of the trainable tensors without a gradient.
        """
        grads = self._gather_many() if len(self.trainable.tensors) >= MANY else self._gather_few()
        self.write_buffers()
        self.gradients.to_host([self.moving]).synchronize()
        self.changes.step(absent := self.absent(grads))
        return absent

    def _gather_few(self) -> list[Tensor | None]:
        self.reattach()
        return self._gather_between(0, None)

    def _gather_many(self) -> list[Tensor | None]:
        # torch's calls release the GIL half of the time, so a second thread pays off
        cuts = range(0, len(self.trainable.tensors), MANY // 2)
        work: list[Callable[[], Any]] = [self.reattach]
        work += [partial(self._gather_between, first, first + MANY // 2) for first in cuts]
        _, *grads = self._team.map(_call, work)
        return list(chain.from_iterable(grads))

    def _gather_between(self, first: int, last: int | None) -> list[Tensor | None]:
        grads = self.grads(first, last)
        self.write(first, grads)
        return grads

    def grads(self, first: int = 0, last: int | None = None) -> list[Tensor | None]:
        """Return the .grad of the trainable tensors [first, last) in flat buffer order."""
        return list(map(_GRAD, self.trainable.tensors[first:last]))

    @property
    def has_gradients(self) -> bool:
        """Whether any trainable tensor has a gradient."""
        return any(map(is_not, map(_GRAD, self.trainable.tensors), repeat(None)))

    def write(self, first: int, grads: Sequence[Tensor | None]) -> None:
        """Copy gradients of trainable tensors, from place `first` on, to the gradient buffer."""
        slots, given = self.trainable.gradients[first : first + len(grads)], present(grads)
        if len(given) < len(grads):
            slots = list(compress(slots, map(is_not, grads, repeat(None))))
        try:
            if given:
                torch._foreach_copy_(slots, given)
        except RuntimeError:
            self._refuse_sparse(first, grads)
            raise

    def _refuse_sparse(self, first: int, grads: Sequence[Tensor | None]) -> None:
        for place, grad in enumerate(grads, first):
            if grad is not None and grad.layout is not torch.strided:
                name = self.trainable.names[place]
                raise InvalidRequestError(
                    f"{name} has a sparse gradient; make its layer with sparse=False"
                )

    def write_buffers(self) -> None:
        """Copy the current buffer values into the gradient buffer."""
        start, stop = self.buffer_range
        if start < stop:
            self.gradients.near[start:stop].copy_(self.weights.near[start:stop])

    def absent(self, grads: Sequence[Tensor | None]) -> frozenset[int]:
        """Return the spec indices of the trainable tensors without a gradient."""
        return frozenset(compress(self.trainable.indices, map(is_, grads, repeat(None))))

    def moving_extents(self) -> dict[int, ByteRange]:
        """Return the byte range of each tensor that travels with a step, by id of the tensor."""
        both = (self.trainable, self._buffers)
        return {
            id(t): extent
            for role in both
            for t, extent in zip(role.tensors, role.extents, strict=True)
        }

    def scatter(self, everything: bool = False) -> None:
        """Copy received weights to the model; frozen tensors only with `everything`."""
        self.weights.from_host([self._everything if everything else self.moving])
        self.changes.came()

    def news(self) -> list[ByteRange]:
        """Return the received byte ranges to copy while the model computes.

        These are all trainable weights, and the buffers whose received value differs from the sent
        one.
        """
        came, left = self.weights.host, self.gradients.host
        buffers = [
            each
            for each in self._buffers.extents
            if not torch.equal(came[slice(*each)], left[slice(*each)])
        ]
        return [ByteRange(0, self.buffer_range.start), *buffers]

    def reattach(self) -> None:
        """Return tensors to the flat buffer if the script or torch replaced their storage.

        Call this before the client writes to the weight buffer; `gather` does. New buffer values
        are kept.

        Raises:
            InvalidRequestError: The dtype, device or shape of a tensor has changed.
        """
        self.weights.rest()
        moved = self.trainable.elsewhere()
        tensors, weights = self.trainable.tensors, self.trainable.weights
        self.changes.check(
            differ := [place for place in moved if not torch.equal(tensors[place], weights[place])]
        )
        # as with changes in place: keep the script's values until the servers overwrite them
        for place in differ:
            weights[place].copy_(tensors[place].detach())
        for place in moved:
            tensors[place].data = weights[place]
        buffers = self._buffers
        current = self._current_buffers()
        for place in compress(range(len(current)), map(is_not, current, buffers.tensors)):
            buffers.check_unchanged(place, current[place])
            self._take_back(place, current[place])
        for place in buffers.elsewhere():
            self._take_back(place, buffers.tensors[place])

    def _current_buffers(self) -> list[Tensor | None]:
        owners = list(map(_BUFFERS, self._owners))
        try:
            return list(map(getitem, owners, self._keys))
        except KeyError:  # the script has deleted one
            return [owner.get(key) for owner, key in zip(owners, self._keys, strict=True)]

    def _take_back(self, place: int, current: Tensor | None) -> None:
        assert current is not None
        tensor, weight = self._buffers.tensors[place], self._buffers.weights[place]
        weight.copy_(current.detach())
        tensor.data = weight
        self._owners[place]._buffers[self._keys[place]] = tensor


@torch.no_grad()  # torch.no_grad applies to one thread only
def _call(work: Callable[[], Any]) -> Any:
    return work()


def present(grads: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the gradients that are not None."""
    return list(compress(grads, map(is_not, grads, repeat(None))))  # type: ignore[arg-type]


def _persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
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


def _model_spec(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    clip_norm: float | None,
) -> ModelSpec:
    groups = {
        id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]
    }
    buffers = {id(buffer) for buffer in model.buffers()}
    aliases = _aliases(model, tensors)
    _check_all_known(optimizer, {id(tensor) for tensor in tensors.values()})
    _refuse_embeddings(model, groups.keys())
    specs = []
    for name, tensor in tensors.items():
        if nn.parameter.is_lazy(tensor):
            raise InvalidRequestError(
                f"{name} has no shape yet: run a batch through the model before job.optimizer"
            )
        role: Role = (
            "trainable" if id(tensor) in groups else "buffer" if id(tensor) in buffers else "frozen"
        )
        dtype = str(tensor.dtype).removeprefix("torch.")
        if role == "buffer" and dtype not in ITEMSIZE:
            raise InvalidRequestError(
                f"buffer {name}: the servers keep none of dtype {dtype}; {OWN}"
            )
        group, shape = groups.get(id(tensor), 0), tuple(tensor.shape)
        specs.append(TensorSpec(name, shape, dtype, role, group, aliases.get(name, ())))
    return _checked(tuple(specs), replace(spec_of(optimizer), clip_norm=clip_norm))


def _checked(tensors: tuple[TensorSpec, ...], optimizer: OptimizerSettings) -> ModelSpec:
    try:
        return ModelSpec(tensors, optimizer)
    except (InvalidModelError, KeyError) as error:
        raise InvalidRequestError(
            f"this model cannot be trained by the servers: {error}"
        ) from error


def _check_all_known(optimizer: torch.optim.Optimizer, known: set[int]) -> None:
    for index, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                raise InvalidRequestError(
                    f"parameter {place} of the optimizer's group {index}, shape "
                    f"{list(parameter.shape)}, is not in the model: give job.optimizer the model "
                    "whose parameters the optimizer was made from"
                )


def _refuse_embeddings(model: nn.Module, trainable: Collection[int]) -> None:
    for name, module in model.named_modules():
        if (
            not isinstance(module, nn.Embedding | nn.EmbeddingBag)
            or id(module.weight) not in trainable
        ):
            continue
        what = name or type(module).__name__
        if module.max_norm is not None:
            raise InvalidRequestError(
                f"{what} has max_norm, which changes its weights in place at each forward; "
                "the job's are on the servers and would not change: make it without max_norm and "
                "bound what it returns"
            )
        if module.sparse and module.weight.requires_grad:
            raise InvalidRequestError(
                f"{what} makes sparse gradients, which servers do not take: make it with "
                f"sparse=False"
            )


def _refuse_shared(model: nn.Module, moved: Mapping[str, Tensor]) -> None:
    # each tensor gets its own byte range, which would separate tensors that overlap in memory
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    spans = sorted((*_span(tensor), name) for name, tensor in tensors.items() if tensor.numel())
    reached, last = 0, ""
    for start, stop, name in spans:
        if start < reached and (name in moved or last in moved):
            raise InvalidRequestError(
                f"{last} and {name} lie in the same memory: tie the Parameter itself (m[1].weight "
                "= m[0].weight), or give each a copy of its own"
            )
        if stop > reached:
            reached, last = stop, name


def _span(tensor: Tensor) -> tuple[int, int]:
    last = sum((side - 1) * step for side, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def _only_device(tensors: Mapping[str, Tensor]) -> torch.device:
    devices = {tensor.device for tensor in tensors.values()}
    if len(devices) != 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        names = ", ".join(sorted(map(str, devices)))
        raise InvalidRequestError(
            f"a worker's model must be on one device, cpu or cuda; this one is on {names}"
        )
    return devices.pop()
