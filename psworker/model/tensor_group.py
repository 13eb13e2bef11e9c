"""The tensors of a model that have the same role, as views of flat buffers."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pscommon.core.errors import InvalidRequestError
from pscommon.core.model_spec import Role
from pscommon.core.partition import PartitionPlan
from psworker.model.flat_buffer import FlatBuffer
from psworker.model.model_spec import LOCAL_BUFFER


class TensorGroup:
    """The tensors of one role in flat buffer order, as parallel lists.

    Attributes:
        spec_indices: Index of each tensor in the model spec.
        names: Name of each tensor.
        extents: Byte range of each tensor in the flat buffer.
        tensors: The model's tensors.
        weights: Views of the weight buffer.
        gradients: Views of the gradient buffer; empty unless the role is "trainable".
        pointers: Data addresses of `tensors`; set by `attach`.
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
        self.spec_indices = [index for index in plan.order if specs[index].role == role]
        self.names = [specs[index].name for index in self.spec_indices]
        self.extents = [plan.extent(index) for index in self.spec_indices]
        self.tensors = [tensors[name] for name in self.names]
        self._specs = [specs[index] for index in self.spec_indices]
        self._weight_buffer = weights
        self.weights = list(map(weights.view, self.extents, self._specs))
        self.gradients = (
            list(map(gradients.view, self.extents, self._specs)) if role == "trainable" else []
        )
        self.pointers: list[int] = []

    def attach(self) -> None:
        """Copy the values into the weight buffer and make the tensors views of it.

        An empty buffer keeps its storage, which its module may resize.
        """
        for tensor, weight in zip(self.tensors, self.weights, strict=True):
            if weight.numel() or self._role == "trainable":
                weight.copy_(tensor.detach())
                tensor.data = weight
        self.pointers = list(map(Tensor.data_ptr, self.tensors))

    def find_moved(self) -> list[int]:
        """Return the positions of tensors whose storage is not that of `attach` any more.

        Raises:
            InvalidRequestError: The dtype, device or shape of such a tensor has changed.
        """
        pointers = list(map(Tensor.data_ptr, self.tensors))
        if pointers == self.pointers:
            return []
        moved = [index for index, pointer in enumerate(pointers) if pointer != self.pointers[index]]
        for index in moved:
            self.check_unchanged(index, self.tensors[index])
        moved = [index for index in moved if self.weights[index].numel()]
        for index in moved:
            if self.weights[index].data_ptr() != self.pointers[index]:
                # share_memory and torch's queues move the storage itself, and the view with it
                view = self._weight_buffer.view(self.extents[index], self._specs[index])
                self.weights[index] = view
        return moved

    def check_unchanged(self, index: int, current: object) -> None:
        """Raise InvalidRequestError unless `current` has the same dtype, device and shape."""
        after, before = (
            (t.dtype, t.device, t.shape, *([] if t.layout is torch.strided else [t.layout]))
            if isinstance(t, Tensor)
            else t
            for t in (current, self.weights[index])
        )
        if after != before:
            remedy = (
                "move, cast and reshape the model before job.optimizer"
                if self.weights[index].numel()
                else "run a batch through the model before job.optimizer"
            )
            is_buffer = self._role == "buffer" and not isinstance(self.tensors[index], nn.Parameter)
            raise InvalidRequestError(
                f"{self.names[index]} has changed from {before} to {after} since job.optimizer. "
                f"Try: {remedy}" + (f"; {LOCAL_BUFFER}" if is_buffer else "")
            )
