"""Conversion between named numpy arrays, a ModelSpec and a flat buffer."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pscommon.core.errors import InvalidRequestError
from pscommon.core.model_spec import (
    InvalidModelError,
    ModelSpec,
    OptimizerSettings,
    Role,
    TensorSpec,
)
from pscommon.core.partition import PartitionPlan
from pscommon.system.thread_team import ALONE, PART_BYTES, ThreadTeam

Array = NDArray[np.generic]
Arrays = Mapping[str, Array]
Gradients = Mapping[str, Array | None]

MIN_PARALLEL_BYTES = 8 << 20
"""Bytes from which several threads copy arrays faster than one."""

DTYPES: Mapping[str, np.dtype[np.generic]] = {
    "float64": np.dtype("<f8"),
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    "int64": np.dtype("<i8"),
    "int32": np.dtype("<i4"),
    "int16": np.dtype("<i2"),
    "int8": np.dtype("i1"),
    "uint8": np.dtype("u1"),
    "bool": np.dtype("?"),
}
"""numpy dtype by tensor dtype. numpy has no bfloat16, so its bits appear as uint16."""


def spec_of(
    params: Arrays, buffers: Arrays, frozen: Arrays, optimizer: OptimizerSettings
) -> ModelSpec:
    """Return the model of these arrays, in their order.

    Raises:
        InvalidRequestError: A name, a dtype or the optimizer is invalid.
    """
    if not isinstance(optimizer, OptimizerSettings):
        raise InvalidRequestError(
            f"optimizer={optimizer!r} is no OptimizerSpec. Try: "
            'psworker.OptimizerSpec("sgd", lr=0.1)'
        )
    groups: tuple[tuple[Role, Arrays], ...] = (
        ("trainable", params),
        ("buffer", buffers),
        ("frozen", frozen),
    )
    tensors = [
        TensorSpec(_text(name), (given := as_array(name, array)).shape, given.dtype.name, role)
        for role, arrays in groups
        for name, array in arrays.items()
    ]
    try:
        return ModelSpec(tuple(tensors), optimizer)
    except InvalidModelError as error:
        raise InvalidRequestError(str(error)) from error


def _text(name: object) -> str:
    if isinstance(name, str):
        return name
    raise InvalidRequestError(f"the name of a tensor is a string, not {name!r}")


def as_array(name: str, array: object) -> Array:
    """Convert to a numpy array.

    Raises:
        InvalidRequestError: numpy cannot convert it, for example a torch tensor that requires
            grad.
    """
    try:
        return np.asarray(array)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"tensor {name!r} cannot be converted to a numpy array: {error}"
        ) from error


def _split(target: Array, source: Array) -> list[tuple[Array, Array]]:
    """Return parts of about PART_BYTES of two arrays of one shape."""
    if target.nbytes <= PART_BYTES or not target.ndim:
        return [(target, source)]
    count = min(len(target), target.nbytes // PART_BYTES)
    return list(zip(np.array_split(target, count), np.array_split(source, count), strict=True))


class ArrayBuffer:
    """A flat buffer in host memory, and its tensors as numpy arrays that share the memory.

    Args:
        team: Threads that copy large arrays.

    Attributes:
        memory: Writable bytes, plan.nbytes of them.
        tensors: Arrays by name, with the shapes and dtypes of the plan's model.
    """

    def __init__(self, plan: PartitionPlan, memory: memoryview, team: ThreadTeam = ALONE) -> None:
        self._plan, self._team = plan, team
        self._bytes = np.frombuffer(memory, np.uint8)
        self.memory = memory
        self.tensors = {
            tensor.name: self._tensor(index) for index, tensor in enumerate(plan.spec.tensors)
        }

    def write(self, arrays: Arrays) -> None:
        """Copy arrays into the flat buffer.

        Raises:
            InvalidRequestError: An array does not fit the model; nothing is written.
        """
        checked = {name: self.fitting(name, array) for name, array in arrays.items()}
        self._copy([(self.tensors[name], array) for name, array in checked.items()])

    def write_gradients(self, grads: Gradients, weights: "ArrayBuffer") -> list[int]:
        """Write the gradients and buffers of a push.

        Args:
            grads: Gradients and buffers by name.
            weights: Source of the buffers that `grads` does not contain.

        Returns:
            Indices of trainable tensors without a gradient.

        Raises:
            InvalidRequestError: As for `write`; also for a gradient of a frozen tensor.
        """
        given = {name: array for name, array in grads.items() if array is not None}
        tensors = self._plan.spec.tensors
        for name in [
            tensor.name for tensor in tensors if tensor.role == "frozen" and tensor.name in given
        ]:
            raise InvalidRequestError(
                f"tensor {name!r} is frozen: it takes no gradient", "UNKNOWN_TENSOR"
            )
        self.write(given)
        for tensor in tensors:
            if tensor.role == "buffer" and tensor.name not in given:
                self.tensors[tensor.name][...] = weights.tensors[tensor.name]
        return [
            i
            for i, tensor in enumerate(tensors)
            if tensor.role == "trainable" and tensor.name not in given
        ]

    def read(self, out: Mapping[str, Array] | None) -> dict[str, Array]:
        """Copy the tensors named in `out` into its arrays; None: all tensors into new arrays."""
        if out is None:
            return {name: tensor.copy() for name, tensor in self.tensors.items()}
        self.check_out(out)
        self._copy([(array, self.tensors[name]) for name, array in out.items()])
        return dict(out)

    def _copy(self, pairs: Sequence[tuple[Array, Array]]) -> None:
        """Copy the second array of each pair to the first one."""
        if sum(target.nbytes for target, _ in pairs) >= MIN_PARALLEL_BYTES:
            pairs = [part for pair in pairs for part in _split(*pair)]
            self._team.map(lambda pair: np.copyto(*pair), pairs)
        else:
            for target, source in pairs:
                target[...] = source

    def check_out(self, out: Mapping[str, Array]) -> None:
        """Raise InvalidRequestError if an array of `out` cannot hold its tensor."""
        for name, array in out.items():
            self.fitting(name, array)
            if not isinstance(array, np.ndarray) or not array.flags.writeable:
                raise InvalidRequestError(
                    f"out[{name!r}] is no writable numpy array. Try: an array of your own"
                )

    def fitting(self, name: str, array: Array) -> Array:
        """Return the array if its name, shape and dtype match a tensor of the model.

        Raises:
            InvalidRequestError: They do not match.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            known = ", ".join(sorted(self.tensors)[:20])
            raise InvalidRequestError(
                f"the model has no tensor {name!r}; it has {known}", "UNKNOWN_TENSOR"
            )
        array = as_array(name, array)
        if array.dtype.newbyteorder("=") != tensor.dtype.newbyteorder("="):
            raise InvalidRequestError(
                f"tensor {name!r} is {tensor.dtype}, not {array.dtype}", "WRONG_DTYPE"
            )
        if array.shape != tensor.shape:
            raise InvalidRequestError(
                f"tensor {name!r} has shape {tensor.shape}, not {array.shape}", "WRONG_SHAPE"
            )
        return array

    def _tensor(self, index: int) -> Array:
        tensor, extent = self._plan.spec.tensors[index], self._plan.extent(index)
        return (
            self._bytes[extent.start : extent.stop].view(DTYPES[tensor.dtype]).reshape(tensor.shape)
        )
