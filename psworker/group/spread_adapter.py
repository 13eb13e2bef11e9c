"""Adapter between a model of which each rank holds a part and the group's flat buffers.

The tensors of such a model (FSDP2's, those of a tensor-parallel plan, a pipeline stage) keep their
storage. Each rank copies its boxes: gradients out of the local tensors, weights into them.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from pscommon.core.errors import InvalidRequestError
from pscommon.core.model_spec import FLOATING, ROLES, Role
from pscommon.core.partition import PartitionPlan
from psworker.group.boxes import Box, SpreadModel
from psworker.group.shared_model import GroupModel
from psworker.model.adapter import refuse_sparse
from psworker.model.change_detector import short, warn_of_overwritten
from psworker.model.flat_buffer import FlatBuffer, local_part
from psworker.model.model_spec import OptimizerMembers, describe_model, persistent_buffers


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

    def local_gradient(self) -> Tensor | None:
        """Return this rank's part of the gradient; ranks call it together."""
        tensor = self._read()
        gradient = tensor.grad
        if isinstance(gradient, DTensor) and isinstance(tensor, DTensor):
            if gradient.placements != tensor.placements:  # parts that are still to be added up
                gradient = gradient.redistribute(placements=tensor.placements)
            return gradient.to_local()
        if gradient is not None:
            refuse_sparse(self.name, gradient)
        return gradient

    def record(self) -> None:
        """Compare later values with the current ones, which are in `last`."""
        self._known = self.last.data_ptr(), self.last._version

    def has_changed(self) -> bool:
        """Return whether the script has set other values since `record`."""
        local = self.local()
        is_known = (local.data_ptr(), local._version) == self._known
        return not is_known and not torch.equal(local.cpu(), self.weight)


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
        boxes = [_box(name, tensor, id(tensor) in reduced) for name, tensor in tensors.items()]
        self._boxes = [box for box in boxes if 0 not in box.sizes]
        self._readers = {
            name: (lambda tensor=tensor: tensor) if name in parameters else _reader(model, name)
            for name, tensor in tensors.items()
        }
        shared.spread = SpreadModel(self._boxes, len(parameters), shared.stage)
        self._members = {
            name: {self.spec.tensors[index].name for index in indices}
            for name, indices in self.spec.trainable_of().items()
        }
        self._has_warned = self._warns_again = False

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
        by_role: dict[Role, list[LocalBox]] = {role: [] for role in ROLES}
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
        members, absent = self._members[optimizer], set()
        targets, sources = [], []
        for box in self._trainable:
            gradient = box.local_gradient() if box.name in members else None
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
        frozen = self._frozen if everything else []
        for box in frozen:
            box.local()
        moving = [*self._trainable, *self._buffers, *frozen]
        _copy([box.last for box in moving], [box.weight for box in moving])
        for box in moving:
            box.record()
        reshard(self._sharded)

    def keeps_changes(self) -> bool:
        """Return whether the script has set trained weights, which then stay for now."""
        reshard(self._sharded)
        self._warns_again = self._warns_again or any(e.has_changed() for e in self._trainable)
        return self._warns_again

    def reattach(self) -> None:
        """Warn of weights that the script has changed: others are written next."""
        reshard(self._sharded)
        changed = [box.name for box in self._trainable if box.has_changed()]
        for box in self._buffers:  # the script may have replaced it
            box.local()
        if changed and (self._warns_again or not self._has_warned):
            self._has_warned = True
            warn_of_overwritten(short(changed))
        self._warns_again = False


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


def _box(name: str, tensor: Tensor, is_reduced: bool) -> Box:
    if not isinstance(tensor, DTensor):
        return Box(name, (0,) * tensor.dim(), tuple(tensor.shape))
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    ranks = tensor.device_mesh.mesh.flatten().tolist() if is_reduced else ()
    return Box(name, tuple(chunk.offsets), tuple(chunk.sizes), tuple(ranks))


def _reduced(model: nn.Module) -> set[int]:
    """Return the ids of the parameters whose gradients FSDP2 reduces."""
    return {
        id(parameter)
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for parameter in module.parameters()
        if isinstance(parameter, DTensor)
    }


def _reader(model: nn.Module, name: str) -> Callable[[], Tensor]:
    """Return a function that returns a buffer, which the script may replace."""
    path, _, key = name.rpartition(".")
    return partial(getattr, model.get_submodule(path), key)
