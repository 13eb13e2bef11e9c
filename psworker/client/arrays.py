"""Conversion between named numpy arrays, a ModelSpec and a flat buffer."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pscommon.core.errors import InvalidRequestError
from pscommon.core.model_spec import (
    ROLES,
    InvalidModelError,
    ModelSpec,
    OptimizerSettings,
    Role,
    TensorSpec,
)
from pscommon.core.partition import PartitionPlan
from pscommon.system.thread_team import ALONE, PART_BYTES, ThreadTeam
from psworker.exchange.transfer import ExchangeBuffer, ScatteredBuffer

Array = NDArray[np.generic]
Arrays = Mapping[str, Array]
Gradients = Mapping[str, Array | None]

MIN_PARALLEL_BYTES = 8 << 20
"""Bytes from which several threads copy arrays faster than one."""

MIN_DIRECT_BYTES = 64 << 10
"""Bytes from which an array costs less as a buffer of its own than as a copy."""

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


def overlap(first: Arrays, second: Arrays) -> bool:
    """Return whether contiguous arrays of the first mapping share memory with the second's."""
    spans = sorted(
        (address, address + array.nbytes, which)
        for which, arrays in enumerate((first, second))
        for array in arrays.values()
        for address in [array.ctypes.data]
    )
    ends = [0, 0]
    for start, stop, which in spans:
        if start < ends[1 - which]:
            return True
        ends[which] = max(ends[which], stop)
    return False


def _bytes_of(array: Array) -> memoryview:
    """Return the memory of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data


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
        tensors = plan.spec.tensors
        self.tensors = {tensor.name: self._tensor(index) for index, tensor in enumerate(tensors)}
        self._forms = {name: (each.dtype, each.shape) for name, each in self.tensors.items()}
        self._names: dict[Role, dict[str, int]] = {
            role: {
                tensor.name: index for index, tensor in enumerate(tensors) if tensor.role == role
            }
            for role in ROLES
        }
        # Only trainable tensors, because the flat buffer always has the buffers pulled last.
        self._large = {
            name: plan.starts[index]
            for name, index in self._names["trainable"].items()
            if tensors[index].nbytes >= MIN_DIRECT_BYTES
        }

    def write(self, arrays: Arrays) -> None:
        """Copy arrays into the flat buffer.

        Raises:
            InvalidRequestError: An array does not fit the model; nothing is written.
        """
        self._copy([(self.tensors[name], array) for name, array in self._checked(arrays).items()])

    def check_gradients(self, grads: Gradients) -> dict[str, Array]:
        """Return the arrays that are given, checked.

        grads: Gradients and buffers by name.

        Raises:
            InvalidRequestError: An array does not fit the model, or its tensor is frozen.
        """
        given = self._checked(grads)
        for name in self._names["frozen"]:
            if name in given:
                raise InvalidRequestError(
                    f"tensor {name!r} is frozen: it takes no gradient", "UNKNOWN_TENSOR"
                )
        return given

    def write_gradients(
        self, given: Arrays, weights: "ArrayBuffer", direct: Arrays
    ) -> ExchangeBuffer:
        """Return the bytes of a push.

        Args:
            given: Gradients and buffers by name, checked.
            weights: Source of the buffers that are not given.
            direct: Those among the given arrays that are not copied.
        """
        self._copy(
            [(self.tensors[name], array) for name, array in given.items() if name not in direct]
        )
        for name in self._names["buffer"]:
            if name not in given:
                self.tensors[name][...] = weights.tensors[name]
        return self.with_arrays(direct)

    def absent(self, given: Arrays) -> list[int]:
        """Return the indices of trainable tensors without a gradient."""
        return [index for name, index in self._names["trainable"].items() if name not in given]

    def usable_in_place(self, arrays: Arrays) -> dict[str, Array]:
        """Return the arrays that an exchange can use where they are: large and contiguous."""
        return {
            name: array
            for name in self._large
            if (array := arrays.get(name)) is not None
            and array.flags.c_contiguous
            and array.dtype == self.tensors[name].dtype
        }

    def with_arrays(self, arrays: Arrays) -> ExchangeBuffer:
        """Return the flat buffer with these arrays, which are large, in place of their tensors."""
        if not arrays:
            return self.memory
        return ScatteredBuffer(
            self.memory, {self._large[name]: _bytes_of(array) for name, array in arrays.items()}
        )

    def read(self, out: Mapping[str, Array] | None, direct: Arrays) -> dict[str, Array]:
        """Copy the tensors named in `out` into its arrays, but for those that need no copy.

        Args:
            out: None: all tensors into new arrays.
            direct: Arrays of `out` that have their values already.
        """
        if out is None:
            return {name: tensor.copy() for name, tensor in self.tensors.items()}
        self._copy(
            [(array, self.tensors[name]) for name, array in out.items() if name not in direct]
        )
        return dict(out)

    def _copy(self, pairs: Sequence[tuple[Array, Array]]) -> None:
        """Copy the second array of each pair to the first one."""
        if (
            self._bytes.nbytes >= MIN_PARALLEL_BYTES
            and sum(target.nbytes for target, _ in pairs) >= MIN_PARALLEL_BYTES
        ):
            pairs = [part for pair in pairs for part in _split(*pair)]
            self._team.map(lambda pair: np.copyto(*pair), pairs)
        else:
            for target, source in pairs:
                target[...] = source

    def check_out(self, out: Mapping[str, Array]) -> None:
        """Raise InvalidRequestError if an array of `out` cannot hold its tensor."""
        self._checked(out)
        for name, array in out.items():
            if not isinstance(array, np.ndarray) or not array.flags.writeable:
                raise InvalidRequestError(
                    f"out[{name!r}] is no writable numpy array. Try: an array of your own"
                )

    def _checked(self, arrays: Gradients) -> dict[str, Array]:
        """Return the arrays that are not None, as arrays that fit their tensors.

        Each step checks each array, so those that fit cost no call.

        Raises InvalidRequestError if a name, a dtype or a shape does not match the model.
        """
        forms, checked = self._forms, dict[str, Array]()
        for name, array in arrays.items():
            if array is not None:
                fits = type(array) is np.ndarray and forms.get(name) == (array.dtype, array.shape)
                checked[name] = array if fits else self._fitting(name, array)
        return checked

    def _fitting(self, name: str, array: Array) -> Array:
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
