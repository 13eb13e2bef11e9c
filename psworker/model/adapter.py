"""Adapter between a torch model and the flat buffers of the client.

On the CPU, parameters and buffers become views of the memory that the client sends from and
receives into, so a pull copies no tensor. On a GPU they become views of a buffer on the device;
copies through pinned memory connect it to the host buffer.

Operations on thousands of tensors use lists built once and C loops (map, _foreach_copy_). A
Python loop would cost more than the copy itself; loops remain only on exceptional paths.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, compress, repeat
from operator import attrgetter, getitem, is_, is_not
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pscommon.core.errors import InvalidRequestError
from pscommon.core.partition import ByteRange, PartitionPlan
from pscommon.system.thread_team import ThreadTeam, cores
from psworker.model.change_detector import (
    ChangeDetector,
    warn_of_overwritten,
    warn_of_unstored,
)
from psworker.model.flat_buffer import CudaBuffer, DoubleBuffer, FlatBuffer
from psworker.model.model_spec import (
    OptimizerMembers,
    check_separate,
    describe_model,
    only_device,
    persistent_buffers,
)
from psworker.model.tensor_group import TensorGroup

THREADED_TENSOR_COUNT = 2048
"""From this many tensors on, calls for single tensors cost more than copying their bytes."""

_GRAD = attrgetter("grad")


class ModelAdapter:
    """Maps one model to a pair of flat buffers.

    Construction takes two steps: `spec` is sent to the servers, and `attach` receives the partition
    plan that they return.

    Roles: parameters of an optimizer are trainable, even with requires_grad False. The other
    parameters are frozen, or travel as buffers if the script asks for it. Persistent buffers are
    buffers; non-persistent buffers stay local. A tied tensor counts once, under its first name.

    Args:
        model: The model.
        optimizers: Its optimizers by name; the name of a single one is empty.

    Attributes:
        spec: Model spec for the servers.
        device: Device of all tensors.
        gradients: Flat buffer of gradients and outgoing buffers; set by `attach`.
        weights: Flat buffer of weights; set by `attach`.
        trainable: The trainable tensors; set by `attach`.
        trainable_indices: Indices of all of them in the model spec; set by `attach`.
        moving: Byte range that travels with every step.
        buffer_range: Byte range of the buffers.
        changes: Detector of in-place changes by the script.
        check_registered: See `registration_check`; set by `attach`.

    Raises:
        InvalidRequestError: The servers cannot train this model.
    """

    def __init__(self, model: nn.Module, optimizers: Mapping[str, OptimizerMembers]) -> None:
        self._model = model
        self._tensors: dict[str, Tensor] = dict(model.named_parameters())
        self._tensors |= persistent_buffers(model)
        self.spec = describe_model(model, self._tensors, optimizers)
        self.device = only_device(self._tensors)
        check_separate(model, self._tensors)
        # a GPU batches the copies, and they must be on the stream of the script's thread
        self._team = ThreadTeam(min(2, cores()) if self.device.type == "cpu" else 1)

    def attach(
        self,
        plan: PartitionPlan,
        memory: tuple[memoryview, memoryview],
        double_buffered: bool = False,
    ) -> None:
        """Move the model into the flat buffers. Parameters stay the same objects with new storage.

        Args:
            plan: Partition plan from the servers.
            memory: The client's gradient and weight memory, plan.nbytes bytes each.
            double_buffered: Keep the model's weights outside `memory`, so that new weights can
                arrive while the model computes.
        """
        self.buffer_range = plan.section("buffer")
        self.moving = ByteRange(0, self.buffer_range.stop)
        self._all_bytes = ByteRange(0, plan.nbytes)
        self.gradients, self.weights = self._make_buffers(memory, double_buffered)
        self.trainable, buffers, frozen = (
            TensorGroup(plan, role, self._tensors, self.weights, self.gradients)
            for role in ("trainable", "buffer", "frozen")
        )
        self.trainable_indices: Sequence[int] = self.trainable.spec_indices
        for group in (self.trainable, buffers, frozen):
            group.attach()
        self._buffers, self._frozen = buffers, frozen
        self._first_ranges = [
            ByteRange(each.start, each.stop)
            for each in plan.segments(self.buffer_range)
            if each.is_first
        ]
        modules = dict(self._model.named_modules())
        self._owners = [modules[name.rpartition(".")[0]] for name in buffers.names]
        self._keys = [name.rpartition(".")[2] for name in buffers.names]
        self._kinds = [
            "_parameters" if key in owner._parameters else "_buffers"
            for owner, key in zip(self._owners, self._keys, strict=True)
        ]
        named = {name: self._tensors[name] for name in self.trainable.names}
        self.check_registered = registration_check(self._model, named)
        self.weights.to_host([self._all_bytes]).synchronize()
        trainable, members = self.trainable, self.spec.trainable_of()
        self._members = {
            name: [index in indices for index in trainable.spec_indices]
            for name, indices in members.items()
            if name
        }
        watched = (
            (trainable, plan.section("trainable"), warn_of_overwritten),
            (frozen, plan.section("frozen"), warn_of_unstored),
        )
        self.changes, self._frozen_changes = (
            ChangeDetector(
                group.names,
                group.spec_indices,
                group.tensors,
                group.extents,
                self.weights.model_bytes[slice(*section)],
                warn,
            )
            for group, section, warn in watched
        )

    def _make_buffers(
        self, memory: tuple[memoryview, memoryview], double_buffered: bool
    ) -> tuple[FlatBuffer, FlatBuffer]:
        if self.device.type == "cuda":
            # frozen tensors come last and have no gradients: leave them out to save GPU memory
            gradients = CudaBuffer(memory[0], self.device, self.moving.stop)
            return gradients, CudaBuffer(memory[1], self.device)
        weights = DoubleBuffer(memory[1]) if double_buffered else FlatBuffer(memory[1])
        return FlatBuffer(memory[0]), weights

    def gather(self, optimizer: str = "") -> frozenset[int]:
        """Copy gradients of an optimizer's tensors, and buffers, into the gradient buffer.

        Returns:
            Spec indices of the trainable tensors of which no gradient is copied.
        """
        self.check_registered()
        own = self._members.get(optimizer)
        if len(self.trainable.tensors) >= THREADED_TENSOR_COUNT:
            grads = self._gather_many(own)
        else:
            self.reattach()
            grads = self._gather_between(own, 0, None)
        self.write_buffers()
        self.gradients.to_host([self.moving]).synchronize()
        self.changes.step(absent := self.absent(grads))
        return absent

    def _gather_many(self, own: Sequence[bool] | None) -> list[Tensor | None]:
        # torch's calls release the GIL half of the time, so a second thread pays off
        size = THREADED_TENSOR_COUNT // 2
        starts = range(0, len(self.trainable.tensors), size)
        work: list[Callable[[], Any]] = [self.reattach]
        work += [partial(self._gather_between, own, first, first + size) for first in starts]
        _, *grads = self._team.map(_call, work)
        return list(chain.from_iterable(grads))

    def _gather_between(
        self, own: Sequence[bool] | None, first: int, last: int | None
    ) -> list[Tensor | None]:
        grads = self.grads(first, last)
        if own is not None:
            grads = [
                grad if is_own else None
                for grad, is_own in zip(grads, own[first:last], strict=True)
            ]
        self.write(first, grads)
        return grads

    def grads(self, first: int = 0, last: int | None = None) -> list[Tensor | None]:
        """Return the .grad of the trainable tensors [first, last) in flat buffer order."""
        return list(map(_GRAD, self.trainable.tensors[first:last]))

    def write(self, first: int, grads: Sequence[Tensor | None]) -> None:
        """Copy gradients of trainable tensors, from number `first` on, to the gradient buffer."""
        targets, sources = self.trainable.gradients[first : first + len(grads)], present(grads)
        if len(sources) < len(grads):
            targets = list(compress(targets, map(is_not, grads, repeat(None))))
        try:
            if sources:
                torch._foreach_copy_(targets, sources)
        except RuntimeError:
            for index, grad in enumerate(grads, first):
                if grad is not None:
                    refuse_sparse(self.trainable.names[index], grad)
            raise

    def write_buffers(self) -> None:
        """Copy the current buffer values into the gradient buffer."""
        start, stop = self.buffer_range
        if start < stop:
            self.gradients.model_bytes[start:stop].copy_(self.weights.model_bytes[start:stop])

    def gather_changed_buffers(self) -> bool:
        """Copy the buffers into the gradient buffer. Return whether one without an average changed.

        The gradient buffer has the values that were sent last.
        """
        now, sent = self.weights.model_bytes, self.gradients.model_bytes
        is_changed = any(
            not torch.equal(now[start:stop], sent[start:stop]) for start, stop in self._first_ranges
        )
        if is_changed:
            self.write_buffers()
            self.gradients.to_host([self.buffer_range]).synchronize()
        return is_changed

    def absent(self, grads: Sequence[Tensor | None]) -> frozenset[int]:
        """Return the spec indices of the trainable tensors without a gradient."""
        return frozenset(compress(self.trainable.spec_indices, map(is_, grads, repeat(None))))

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
        self.weights.from_host([self._all_bytes if everything else self.moving])
        self.changes.record_arrival()
        if everything:
            self._frozen_changes.record_arrival()

    def keep_buffers(self) -> None:
        """Return the values of the last `write_buffers` to the buffers without an average.

        Received values replace the model's only where the job has a newer version.
        """
        for start, stop in self._first_ranges:
            self.weights.model_bytes[start:stop].copy_(self.gradients.model_bytes[start:stop])

    def own_buffers(self) -> dict[str, Tensor]:
        """Return the model's buffers without an average, as the script has left them, by name."""
        own = {}
        for place, tensor in enumerate(self._current_buffers()):
            start, _ = self._buffers.extents[place]
            if any(first <= start < stop for first, stop in self._first_ranges):
                self._buffers.check_unchanged(place, tensor)
                assert tensor is not None
                own[self._buffers.names[place]] = tensor.detach().cpu()
        return own

    def keeps_changes(self) -> bool:
        """Return whether the script has set trained weights, which then stay for now."""
        return self.changes.keep(self._replaced(self.trainable.find_moved()))

    def _replaced(self, moved: Sequence[int]) -> list[int]:
        tensors, weights = self.trainable.tensors, self.trainable.weights
        return [index for index in moved if not torch.equal(tensors[index], weights[index])]

    def received_ranges(self) -> list[ByteRange]:
        """Return the received byte ranges to copy while the model computes.

        These are all trainable weights, and the buffers whose received value differs from the sent
        one.
        """
        received, sent = self.weights.host, self.gradients.host
        buffers = [
            extent
            for extent in self._buffers.extents
            if not torch.equal(received[slice(*extent)], sent[slice(*extent)])
        ]
        return [ByteRange(0, self.buffer_range.start), *buffers]

    def reattach(self) -> None:
        """Return tensors to the flat buffer if the script or torch replaced their storage.

        Call this before the client writes to the weight buffer; `gather` does. New buffer values
        are kept.

        Raises:
            InvalidRequestError: The dtype, device or shape of a tensor has changed.
        """
        self.weights.wait_until_read()
        moved = self.trainable.find_moved()
        tensors, weights = self.trainable.tensors, self.trainable.weights
        changed = self._replaced(moved)
        self.changes.check(changed)
        self._check_frozen()
        # as with changes in place: keep the script's values until the servers overwrite them
        for index in changed:
            weights[index].copy_(tensors[index].detach())
        for index in moved:
            tensors[index].data = weights[index]
        buffers = self._buffers
        current = self._current_buffers()
        for index in compress(range(len(current)), map(is_not, current, buffers.tensors)):
            buffers.check_unchanged(index, current[index])
            self._restore_buffer(index, current[index])
        for index in buffers.find_moved():
            self._restore_buffer(index, buffers.tensors[index])

    def _check_frozen(self) -> None:
        if not self._frozen.tensors or self._frozen_changes.has_warned:
            return
        pointers = list(map(Tensor.data_ptr, self._frozen.tensors))
        moved = np.flatnonzero(np.not_equal(pointers, self._frozen.pointers)).tolist()
        self._frozen.pointers = pointers
        pairs = [(self._frozen.tensors[index], self._frozen.weights[index]) for index in moved]
        self._frozen_changes.check(
            index
            for index, (tensor, weight) in zip(moved, pairs, strict=True)
            if (tensor.dtype, tensor.device) != (weight.dtype, weight.device)
            or not torch.equal(tensor, weight)
        )
        self._frozen_changes.record_arrival()

    def _current_buffers(self) -> list[Tensor | None]:
        owners = list(map(getattr, self._owners, self._kinds))
        try:
            return list(map(getitem, owners, self._keys))
        except KeyError:  # the script has deleted one
            return [owner.get(key) for owner, key in zip(owners, self._keys, strict=True)]

    def _restore_buffer(self, index: int, current: Tensor | None) -> None:
        assert current is not None
        tensor, weight = self._buffers.tensors[index], self._buffers.weights[index]
        if not weight.numel():  # it keeps its storage
            self._buffers.tensors[index] = current
            return
        weight.copy_(current.detach())
        tensor.data = weight
        getattr(self._owners[index], self._kinds[index])[self._keys[index]] = tensor


def registration_check(model: nn.Module, parameters: Mapping[str, Tensor]) -> Callable[[], None]:
    """Return a function that refuses steps when a module has another parameter in a place.

    It raises InvalidRequestError. A parameter may leave its place, as with parametrizations.
    """
    modules = dict(model.named_modules())
    owned = [(modules[name.rpartition(".")[0]]._parameters, name) for name in parameters]
    owned = [(slot, name) for slot, name in owned if isinstance(slot, dict)]  # not of TorchScript
    slots, names = [slot for slot, _ in owned], [name for _, name in owned]
    keys, known = [e.rpartition(".")[2] for e in names], [parameters[e] for e in names]

    def check() -> None:
        current = list(map(dict.get, slots, keys))
        if not any(map(is_not, current, known)):
            return
        for name, now, before in zip(names, current, known, strict=True):
            if now is not None and now is not before:
                raise InvalidRequestError(
                    f"{name} is another parameter since job.optimizer, and a step would not change "
                    "it. Try: fully_shard, parallelize_module and new layers before job.optimizer"
                )

    return check


def refuse_sparse(name: str, gradient: Tensor) -> None:
    """Raise InvalidRequestError if a gradient is sparse."""
    if gradient.layout is not torch.strided:
        raise InvalidRequestError(
            f"{name} has a sparse gradient, which servers do not support. Try: make its layer with "
            "sparse=False"
        )


@torch.no_grad()  # torch.no_grad applies to one thread only
def _call(work: Callable[[], Any]) -> Any:
    return work()


def present(grads: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the gradients that are not None."""
    return list(compress(grads, map(is_not, grads, repeat(None))))  # type: ignore[arg-type]
