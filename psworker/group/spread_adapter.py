"""Adapter between a model of which each rank holds a part and the group's flat buffers.

The tensors of such a model (FSDP2's, those of a tensor-parallel plan, a pipeline stage) keep their
storage. Each rank copies its boxes: gradients out of the local tensors, weights into them.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from pscommon.core.errors import InvalidRequestError
from pscommon.core.model_spec import FLOATING, ROLES, Role
from pscommon.core.partition import PartitionPlan
from psworker.group.boxes import Box, SpreadModel
from psworker.group.shared_model import GroupModel
from psworker.model.adapter import refuse_sparse, registration_check
from psworker.model.change_detector import (
    SAMPLE_TENSOR_COUNT,
    SAMPLE_WORD_COUNT,
    short,
    warn_of_overwritten,
    warn_of_unstored,
)
from psworker.model.flat_buffer import FlatBuffer, local_part
from psworker.model.model_spec import OptimizerMembers, describe_model, persistent_buffers

_NONE = torch.empty(0, dtype=torch.uint8)


class LocalBox:
    """A box that this rank holds, and where it lies in the group's flat buffers.

    Args:
        box: The box.
        index: Index of its tensor in the spec.
        read: Returns its tensor.
        shared: The group's model.

    Attributes:
        weight: View of the group's weights.
        gradient: Where this rank writes gradient or buffer; None: another rank does.
        last: The last result of `local`.
    """

    def __init__(
        self, box: Box, index: int, read: Callable[[], Tensor], shared: GroupModel
    ) -> None:
        self.name, self.index, self._read = box.name, index, read
        self.weight, self.gradient = shared.views(box)
        self._known = 0, 0
        self.last = self.local()

    def local(self) -> Tensor:
        """Return this rank's part of the tensor."""
        local = local_part(self._read())
        if (local.dtype, local.shape) != (self.weight.dtype, self.weight.shape):
            raise InvalidRequestError(
                f"{self.name} has changed from {self.weight.dtype} {list(self.weight.shape)} to "
                f"{local.dtype} {list(local.shape)} since job.optimizer. Try: cast and reshape the "
                "model before job.optimizer"
            )
        self.last = local
        return local

    def record(self) -> None:
        """Compare later values with the current ones, which are in `last`."""
        self._known = self.last.data_ptr(), self.last._version

    def is_recorded(self) -> bool:
        """Return whether `last` is the tensor of `record`, as far as torch shows changes."""
        return (self.last.data_ptr(), self.last._version) == self._known


class LocalBoxes(list[LocalBox]):
    """This rank's boxes of one role, which notice what the script changes.

    As in psworker.model.change_detector, a sample shows writes that torch's versions do not.
    """

    _sample: Mapping[torch.device, Tensor] = {}

    def record(self) -> None:
        """Compare later values with the current ones."""
        for box in self:
            box.record()
        self._sample = self._sampled()

    def changed(self) -> list[str]:
        """Return the names of the boxes to which the script has given other values."""
        for box in self:
            box.local()
        sample = self._sampled()
        same = [key for key in sample if torch.equal(sample[key], self._sample.get(key, _NONE))]
        return [
            box.name
            for box in self
            if not (box.is_recorded() and box.last.device in same)
            and not torch.equal(box.last.cpu(), box.weight)
        ]

    def _sampled(self) -> Mapping[torch.device, Tensor]:
        """Return bytes of the boxes, by device: one comparison waits for a GPU."""
        found: dict[torch.device, list[Tensor]] = {}
        sampled = self[:: len(self) // SAMPLE_TENSOR_COUNT + 1]
        for box in sampled:
            stride = box.last.numel() * len(sampled) // SAMPLE_WORD_COUNT | 1
            words = box.last.reshape(-1)[::stride].contiguous().view(torch.uint8)
            found.setdefault(box.last.device, []).append(words)
        return {device: torch.cat(words) for device, words in found.items()}


class SpreadAdapter:
    """Maps a model that is spread over the ranks to the group's flat buffers.

    It implements psworker.steps.step.Adapter; roles are those of psworker.model.adapter.

    Args:
        shared: The group's model.
        model: This rank's part of the model.
        optimizers: Its optimizers by name; the name of a single one is empty.

    Raises:
        InvalidRequestError: The servers cannot train this model.
    """

    def __init__(
        self, shared: GroupModel, model: nn.Module, optimizers: Mapping[str, OptimizerMembers]
    ) -> None:
        self._shared = shared
        self._sharded = sharded_modules(model)
        reshard(self._sharded)
        parameters: dict[str, Tensor] = dict(model.named_parameters())
        known = set(map(id, parameters.values()))
        members = chain.from_iterable(chain(*(each.groups for each in optimizers.values())))
        if not known.issuperset(map(id, members)):
            raise InvalidRequestError(
                "job.optimizer failed: the optimizer has parameters that the model has not; "
                "fully_shard and parallelize_module replace them. Try: make the optimizer after "
                "them"
            )
        tensors = parameters | persistent_buffers(model)
        self.spec = describe_model(model, tensors, optimizers)
        if absent := [name for name, tensor in tensors.items() if tensor.is_meta]:
            raise InvalidRequestError(
                f"job.optimizer failed: {absent[0]} is on the meta device and has no values. Try: "
                "model.to_empty(device=job.device), then initialize it"
            )
        reduced = _reduced(model)
        boxes = [_box(name, tensor, reduced.get(id(tensor))) for name, tensor in tensors.items()]
        self._boxes = [box for box in boxes if 0 not in box.sizes]
        self._readers = {
            name: (lambda tensor=tensor: tensor) if name in parameters else _reader(model, name)
            for name, tensor in tensors.items()
        }
        networks = {f"{name}." if name else "": name for name in sorted(optimizers)}
        stages = {
            start: shared.stages.get(model.get_submodule(name)) for start, name in networks.items()
        }
        shared.spread = SpreadModel(self._boxes, len(parameters), stages)
        self._members = {
            name: {self.spec.tensors[index].name for index in indices}
            for name, indices in self.spec.trainable_of().items()
        }
        trained = set().union(*self._members.values())
        self._parameters = {name: each for name, each in parameters.items() if name in trained}
        self._check_registered = registration_check(model, self._parameters)
        self._has_warned = self._has_warned_of_frozen = self._warns_again = False

    @torch.no_grad()
    def attach(
        self,
        plan: PartitionPlan,
        memory: tuple[memoryview, memoryview],
        double_buffered: bool = False,
    ) -> None:
        """Use the group's flat buffers, and write this rank's boxes of the weights into them."""
        assert not double_buffered, "overlap and pipeline are refused in a group"
        self.gradients, self.weights = map(FlatBuffer, memory)
        self.spec = plan.spec
        self.trainable_indices = [
            index for index, tensor in enumerate(plan.spec.tensors) if tensor.role == "trainable"
        ]
        index_of = {tensor.name: index for index, tensor in enumerate(plan.spec.tensors)}
        by_role: dict[Role, LocalBoxes] = {role: LocalBoxes() for role in ROLES}
        for box in self._boxes:
            index = index_of[box.name]
            added = LocalBox(box, index, self._readers[box.name], self._shared)
            by_role[plan.spec.tensors[index].role].append(added)
            if self._shared.writes(box):
                added.weight.copy_(added.last)
        self._trainable, self._buffers, self._frozen = (by_role[role] for role in ROLES)
        firsts = {
            index
            for index, tensor in enumerate(plan.spec.tensors)
            if tensor.treatment == "first" or tensor.dtype not in FLOATING
        }
        self._firsts = [each for each in self._buffers if each.index in firsts]
        self._sent: list[Tensor] = []

    # ---- steps -----------------------------------------------------------------------------------

    @torch.no_grad()
    def gather(self, optimizer: str = "") -> frozenset[int]:
        """Write gradients of an optimizer's tensors, and buffers; as ModelAdapter.gather."""
        self.reattach()
        self._check_registered()
        members, absent = self._members[optimizer], set()
        # of tensors without a box, too: ranks add up parts together
        gradients = {
            name: _local_gradient(name, tensor)
            for name, tensor in self._parameters.items()
            if name in members
        }
        targets, sources = [], []
        for box in self._trainable:
            gradient = gradients.get(box.name)
            if gradient is None:
                absent.add(box.index)
            elif box.gradient is not None:
                targets.append(box.gradient)
                sources.append(gradient)
        _copy(targets, sources)
        self.write_buffers()
        self._share_buffers()
        return frozenset(absent)

    def write_buffers(self) -> None:
        """Keep a copy of the buffers as they are now."""
        self._sent = [box.local().cpu().clone() for box in self._buffers]

    def _share_buffers(self) -> None:
        for box, value in zip(self._buffers, self._sent, strict=True):
            if box.gradient is not None:
                box.gradient.copy_(value)

    @torch.no_grad()
    def gather_changed_buffers(self) -> bool:
        """Write the buffers. Return whether one without an average changed since the last time."""
        before = dict(zip(self._buffers, self._sent, strict=True)) if self._sent else {}
        self.write_buffers()
        self._share_buffers()
        now = dict(zip(self._buffers, self._sent, strict=True))
        return any(not torch.equal(before.get(e, e.weight), now[e]) for e in self._firsts)

    @torch.no_grad()
    def keep_buffers(self) -> None:
        """Return the values of the last `write_buffers` to the buffers without an average."""
        for box, value in zip(self._buffers, self._sent, strict=True):
            if box in self._firsts:
                box.local().copy_(value)

    def own_buffers(self) -> dict[str, Tensor]:
        """Return this rank's buffers without an average, as the script has left them, by name."""
        return {
            box.name: box.local().cpu()
            for box in self._firsts
            if box.weight.shape == self.spec.tensors[box.index].shape
        }

    @torch.no_grad()
    def scatter(self, everything: bool = False) -> None:
        """Copy this rank's boxes of the weights to the model; frozen ones with `everything`.

        `reattach` or `attach` comes before: the script has not changed the tensors since.
        """
        roles = [self._trainable, self._buffers, *([self._frozen] if everything else [])]
        for box in self._frozen if everything else ():
            box.local()
        moving = list(chain(*roles))
        _copy([box.last for box in moving], [box.weight for box in moving])
        for boxes in roles:
            boxes.record()
        reshard(self._sharded)

    def keeps_changes(self) -> bool:
        """Return whether the script has set trained weights, which then stay for now."""
        reshard(self._sharded)
        self._warns_again = self._warns_again or bool(self._trainable.changed())
        return self._warns_again

    def reattach(self) -> None:
        """Warn of weights that the script has changed: others are written next."""
        reshard(self._sharded)
        changed = self._trainable.changed()
        if not self._has_warned_of_frozen and (frozen := self._frozen.changed()):
            self._has_warned_of_frozen = True
            warn_of_unstored(short(frozen))
        for box in self._buffers:  # the script may have replaced it
            box.local()
        if changed and (self._warns_again or not self._has_warned):
            self._has_warned = True
            warn_of_overwritten(short(changed))
        self._warns_again = False


def _local_gradient(name: str, tensor: Tensor) -> Tensor | None:
    """Return this rank's part of a gradient; ranks call it together."""
    gradient = tensor.grad
    if isinstance(gradient, DTensor) and isinstance(tensor, DTensor):
        if gradient.placements != tensor.placements:  # parts that are still to be added up
            gradient = gradient.redistribute(placements=tensor.placements)
        return gradient.to_local()
    if gradient is not None:
        refuse_sparse(name, gradient)
    return gradient


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors, and wait until they are copied: other ranks write to shared memory."""
    streams = {torch.cuda.current_stream(e.device) for e in (*targets, *sources) if e.is_cuda}
    if sources and not streams:
        torch._foreach_copy_(targets, sources)
    for target, source in zip(targets, sources, strict=True) if streams else ():
        target.copy_(source, non_blocking=True)
    for stream in streams:
        stream.synchronize()


def reshard(modules: Iterable[FSDPModule]) -> None:
    """Let FSDP2 gather the weights again for the next forward."""
    for module in modules:
        module.reshard()


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """Return the modules that FSDP2 manages."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _box(name: str, tensor: Tensor, mesh: DeviceMesh | None) -> Box:
    """Return what this rank holds of a tensor. mesh: FSDP2 reduces its gradient over it."""
    if not isinstance(tensor, DTensor):
        return Box(name, (0,) * tensor.dim(), tuple(tensor.shape))
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    reduced = () if mesh is None else tuple(mesh.mesh.flatten().tolist())
    place = tuple(chunk.offsets), tuple(chunk.sizes)
    return Box(name, *place, reduced, _computed_by(tensor, set(reduced)))


def _computed_by(tensor: DTensor, reduced: set[int]) -> tuple[int, ...]:
    """Return the ranks that differ from this one only where a plan divides the tensor.

    reduced: Ranks over which FSDP2 reduces the gradient: what differs among them is its part.
    """
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    index: list[int | slice] = [*coordinate]
    for dimension, placement in enumerate(tensor.placements):
        line: list[int | slice] = [*coordinate]
        line[dimension] = slice(None)
        if not placement.is_replicate() and not reduced.issuperset(mesh.mesh[tuple(line)].tolist()):
            index[dimension] = slice(None)
    return tuple(mesh.mesh[tuple(index)].flatten().tolist())


def _param_groups(module: Any) -> list[Any]:
    """Return what FSDP2 knows of a module's parameters, for which it has no public interface."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # not in older releases
    return [e for e in (groups or [state._fsdp_param_group]) if e is not None]


def _reduced(model: nn.Module) -> dict[int, DeviceMesh]:
    """Return the mesh over which FSDP2 reduces the gradient of a parameter, by its id."""
    found: dict[int, DeviceMesh] = {}
    sharded: list[Any] = [*sharded_modules(model)]
    for module in sharded:
        try:
            for group in _param_groups(module):
                infos = [each._module_info for each in group.fsdp_params]
                owned = [getattr(info.module, info.param_name) for info in infos]
                found |= {id(parameter): group.mesh_info.mesh for parameter in owned}
        except AttributeError:  # another torch
            both = [(id(e), e.device_mesh) for e in module.parameters() if isinstance(e, DTensor)]
            found |= {key: mesh for key, mesh in both if key not in found}
    return found


def has_only_replicas(module: FSDPModule) -> bool:
    """Return whether FSDP2 reduces gradients over replicas only, without a reduce-scatter."""
    with suppress(AttributeError):
        meshes = [group.mesh_info for group in _param_groups(module)]
        return any(e.mesh.size() > 1 and getattr(e, "shard_mesh_size", 1) == 1 for e in meshes)
    return False


def _reader(model: nn.Module, name: str) -> Callable[[], Tensor]:
    """Return a function that returns a buffer, which the script may replace."""
    path, _, key = name.rpartition(".")
    return partial(getattr, model.get_submodule(path), key)
