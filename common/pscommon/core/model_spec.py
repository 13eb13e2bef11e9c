"""Model specification: the tensors of a model, and the optimizers that the servers run."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, cast

Role = Literal["trainable", "buffer", "frozen"]
Treatment = Literal["average", "first"]
Scalar = bool | int | float | str | tuple[float, ...] | None

ROLES: tuple[Role, ...] = ("trainable", "buffer", "frozen")
TREATMENTS: tuple[Treatment, ...] = ("average", "first")

ITEMSIZE: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
FLOATING = frozenset({"float64", "float32", "float16", "bfloat16"})


class InvalidModelError(ValueError):
    """A model or optimizer that servers cannot train; the message names the tensor or setting."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the model.

    name: name in the model.
    shape: shape; () for a scalar.
    dtype: a key of ITEMSIZE.
    role: "trainable": has gradients. "buffer" (BatchNorm statistics): every push sends its values.
        "frozen": set once by the first worker, never changed.
    group: index of the parameter group, see ModelSpec.groups; 0 unless trainable.
    aliases: further names in the model's state_dict (tied weights). They do not affect training, so
        tensors that differ only in aliases are equal.
    treatment: what an update makes of the values of a floating buffer: their average over the
        pushes, or those of the first push. None: not said, so averaged; it fits either one. Other
        buffers have no treatment: they come from the first push.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role = "trainable"
    group: int = 0
    aliases: tuple[str, ...] = field(default=(), compare=False)
    treatment: Treatment | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * ITEMSIZE[self.dtype]

    def describe(self) -> str:
        treatment = f" ({self.treatment})" if self.treatment else ""
        return f"{self.dtype}[{', '.join(map(str, self.shape))}] {self.role}{treatment}"


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """A torch.optim class and its hyper-parameters, as data: no code is transmitted.

    name: name of the class.
    groups: hyper-parameters of each parameter group.
    clip_norm: maximum L2 norm, over all parameters, of an update's averaged gradient; a larger one
        is scaled down. None: no limit.
    """

    name: str
    groups: tuple[Mapping[str, Scalar], ...] = field(default=({},))
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        if self.clip_norm is not None and not is_clip_norm(self.clip_norm):
            raise InvalidModelError(f"clip_norm is {self.clip_norm!r}, not a finite number above 0")
        if self.clip_norm is not None:
            object.__setattr__(self, "clip_norm", float(self.clip_norm))  # 1 and 1.0 encode alike

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, JSON-ready.

        The clip norm is present only if it is set, so that other specs keep their encoding.
        """
        clip = {} if self.clip_norm is None else {"clip_norm": self.clip_norm}
        return {"name": self.name, "groups": [dict(group) for group in self.groups], **clip}

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> "OptimizerSettings":
        """Return the optimizer from the result of `as_dict`."""
        groups = tuple(freeze(group) for group in typed(raw, "groups", list))
        return OptimizerSettings(typed(raw, "name", str), groups, raw.get("clip_norm"))


Optimizers = OptimizerSettings | Mapping[str, OptimizerSettings]
"""One optimizer for all trainable tensors, or several by name for disjoint sets of them."""


def optimizers_to_json(optimizer: Optimizers) -> Any:
    """Return the optimizers as JSON values; `optimizers_from_json` is the inverse.

    Releases that know one optimizer per job refuse several: these are a list.
    """
    if isinstance(optimizer, OptimizerSettings):
        return optimizer.as_dict()
    return [[name, settings.as_dict()] for name, settings in optimizer.items()]


def optimizers_from_json(raw: Any) -> Optimizers:
    """Return the optimizers from the result of `optimizers_to_json`.

    Raises:
        KeyError, TypeError, AttributeError, ValueError: The value is not such a result.
    """
    if isinstance(raw, list):
        return {
            typed({"name": name}, "name", str): OptimizerSettings.from_dict(settings)
            for name, settings in raw
        }
    return OptimizerSettings.from_dict(raw)


def is_clip_norm(value: object) -> bool:
    """Return whether the value is a finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def freeze(group: Mapping[str, object]) -> dict[str, Scalar]:
    """Convert lists, which JSON returns, to the tuples that torch expects."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in group.items()}  # type: ignore[misc]


class OptimizerPart(NamedTuple):
    """The part of a model that one optimizer updates.

    settings: the optimizer.
    tensors: its trainable tensors; their `group` is an index into the groups of `settings`.
    """

    settings: OptimizerSettings
    tensors: Sequence[TensorSpec]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The model that a job trains.

    tensors: all tensors, in registration order.
    optimizer: the optimizer, or several by name.
    """

    tensors: tuple[TensorSpec, ...]
    optimizer: Optimizers

    def __post_init__(self) -> None:
        if isinstance(self.optimizer, Mapping):
            if not self.optimizer or "" in self.optimizer:
                raise InvalidModelError("each of several optimizers needs a name")
            object.__setattr__(self, "optimizer", dict(sorted(self.optimizer.items())))
        seen, groups = set[str](), len(self.groups)
        for tensor in self.tensors:
            _check(tensor, seen, groups)
            seen.update((tensor.name, *tensor.aliases))
        if not self.tensors:
            raise InvalidModelError("a model needs at least one tensor")

    @property
    def optimizers(self) -> Mapping[str, OptimizerSettings]:
        """The optimizers by name, in the order of names; the name of a single one is empty."""
        single = isinstance(self.optimizer, OptimizerSettings)
        return {"": self.optimizer} if single else self.optimizer  # type: ignore[dict-item,return-value]

    @property
    def groups(self) -> tuple[Mapping[str, Scalar], ...]:
        """The parameter groups of all optimizers, in the order of `optimizers`."""
        return tuple(group for each in self.optimizers.values() for group in each.groups)

    def group_ranges(self) -> dict[str, range]:
        """Return the indices into `groups` that each optimizer has."""
        found, start = {}, 0
        for name, settings in self.optimizers.items():
            found[name] = range(start, start + len(settings.groups))
            start += len(settings.groups)
        return found

    def trainable_of(self) -> dict[str, frozenset[int]]:
        """Return the indices of the trainable tensors that each optimizer updates."""
        return {
            name: frozenset(
                index
                for index, tensor in enumerate(self.tensors)
                if tensor.role == "trainable" and tensor.group in groups
            )
            for name, groups in self.group_ranges().items()
        }

    def parts(self) -> dict[str, OptimizerPart]:
        """Return each optimizer with its trainable tensors."""
        ranges, members = self.group_ranges(), self.trainable_of()
        return {
            name: OptimizerPart(
                settings,
                [
                    replace(tensor, group=tensor.group - ranges[name].start)
                    for tensor in (self.tensors[index] for index in sorted(members[name]))
                ],
            )
            for name, settings in self.optimizers.items()
        }

    def fingerprint(self) -> str:
        """Return a digest of tensors and optimizers, independent of the order of the tensors.

        It is equal for two workers exactly when they train the same model.
        """
        rows = sorted(
            (t.name, list(t.shape), t.dtype, t.role, t.group, t.treatment or "")
            for t in self.tensors
        )
        return hashlib.sha256(json.dumps([rows, self.optimizer_json()]).encode()).hexdigest()

    def optimizer_json(self) -> str:
        """Return `optimizers_to_json` as text."""
        return json.dumps(optimizers_to_json(self.optimizer), sort_keys=True)

    def differences(self, job: "ModelSpec") -> list[str]:
        """Return the differences from the job's model, one line for each tensor or setting.

        A treatment that one of the two leaves open is no difference: the job's counts.
        """
        mine, theirs = ({t.name: t for t in spec.tensors} for spec in (self, job))
        lines = [f"{name}: not in the job's model" for name in mine if name not in theirs]
        lines += [
            f"{name}: missing; the job has {theirs[name].describe()}"
            for name in theirs
            if name not in mine
        ]
        for name in mine.keys() & theirs.keys():
            if not _fit(mine[name], theirs[name]):
                lines.append(_tensor_difference(mine[name], theirs[name]))
        return sorted(lines) + _optimizers_differences(self.optimizers, job.optimizers)


def _check(tensor: TensorSpec, seen: set[str], groups: int) -> None:
    names = (tensor.name, *tensor.aliases)
    if repeated := [name for name in names if name in seen or names.count(name) > 1]:
        raise InvalidModelError(f"tensor {repeated[0]!r} is listed twice")
    if tensor.dtype not in ITEMSIZE:
        raise InvalidModelError(
            f"tensor {tensor.name!r}: dtype {tensor.dtype} is not one of {', '.join(ITEMSIZE)}"
        )
    if tensor.role == "trainable" and tensor.dtype not in FLOATING:
        raise InvalidModelError(
            f"tensor {tensor.name!r}: {tensor.dtype} cannot be trained. Try: a floating dtype"
        )
    if tensor.role not in ROLES or not 0 <= tensor.group < groups:
        raise InvalidModelError(
            f"tensor {tensor.name!r}: role {tensor.role!r}, group {tensor.group} of {groups}"
        )
    if tensor.treatment is not None and (
        tensor.treatment not in TREATMENTS
        or tensor.role != "buffer"
        or tensor.dtype not in FLOATING
    ):
        raise InvalidModelError(
            f"tensor {tensor.name!r}: treatment {tensor.treatment!r} of {tensor.dtype} "
            f"{tensor.role}. Try: average or first, for a floating buffer"
        )
    if any(side < 0 for side in tensor.shape):
        raise InvalidModelError(f"tensor {tensor.name!r}: negative shape {tensor.shape}")


def _fit(mine: TensorSpec, theirs: TensorSpec) -> bool:
    if mine.treatment and theirs.treatment:
        return mine == theirs
    return replace(mine, treatment=None) == replace(theirs, treatment=None)


def _tensor_difference(mine: TensorSpec, theirs: TensorSpec) -> str:
    text = f"{mine.name}: {mine.describe()}, the job has {theirs.describe()}"
    if mine.group == theirs.group:
        return text
    return f"{text}; group {mine.group}, the job has {theirs.group}"


def _optimizers_differences(
    mine: Mapping[str, OptimizerSettings], theirs: Mapping[str, OptimizerSettings]
) -> list[str]:
    if mine.keys() != theirs.keys():
        names, job_names = (", ".join(filter(None, each)) or "no name" for each in (mine, theirs))
        return [f"optimizers: {names}, the job has {job_names}"]
    return [
        line
        for name in mine
        for line in _optimizer_differences(f"optimizer {name}".rstrip(), mine[name], theirs[name])
    ]


def _optimizer_differences(
    label: str, mine: OptimizerSettings, theirs: OptimizerSettings
) -> list[str]:
    if mine.name != theirs.name:
        return [f"{label}: {mine.name}, the job has {theirs.name}"]
    if len(mine.groups) != len(theirs.groups):
        return [f"{label}: {len(mine.groups)} parameter groups, the job has {len(theirs.groups)}"]
    clips = [mine.clip_norm, theirs.clip_norm]
    different = clips[0] != clips[1]
    return [f"{label}: clip_norm={clips[0]!r}, the job has {clips[1]!r}"] * different + [
        f"{label} group {index}: {key}={ours.get(key)!r}, the job has {job.get(key)!r}"
        for index, (ours, job) in enumerate(zip(mine.groups, theirs.groups, strict=True))
        for key in sorted(ours.keys() | job.keys())
        if ours.get(key) != job.get(key)
    ]


def typed(raw: Mapping[str, Any], key: str, kind: type) -> Any:
    """Return a field of a JSON object.

    Raises:
        KeyError: The field is missing.
        TypeError: The field has another type.
    """
    value = raw[key]
    if type(value) is not kind:  # not isinstance: a bool is no number here
        raise TypeError(f"{key} is {value!r}, not {kind.__name__}")
    return value


def model_to_json(model: ModelSpec) -> dict[str, Any]:
    """Return the model, JSON-ready; `model_from_json` is the inverse."""
    return {
        "tensors": [_tensor_to_json(tensor) for tensor in model.tensors],
        "optimizer": optimizers_to_json(model.optimizer),
    }


def model_from_json(raw: Mapping[str, Any]) -> ModelSpec:
    """Return the model from the result of `model_to_json`.

    Raises:
        KeyError, TypeError, AttributeError, ValueError: The value is not such a result.
    """
    return ModelSpec(
        tuple(_tensor_from_json(tensor) for tensor in typed(raw, "tensors", list)),
        optimizers_from_json(raw["optimizer"]),
    )


def _tensor_to_json(t: TensorSpec) -> dict[str, Any]:
    """Return the tensor, JSON-ready; fields of newer releases are present only if they are set."""
    fields = {
        "name": t.name,
        "shape": list(t.shape),
        "dtype": t.dtype,
        "role": t.role,
        "group": t.group,
    }
    treatment = {"treatment": t.treatment} if t.treatment else {}
    return fields | ({"aliases": list(t.aliases)} if t.aliases else {}) | treatment


def _tensor_from_json(raw: Mapping[str, Any]) -> TensorSpec:
    shape = typed(raw, "shape", list)
    return TensorSpec(
        typed(raw, "name", str),
        tuple(typed({"side": side}, "side", int) for side in shape),
        typed(raw, "dtype", str),
        cast(Role, typed(raw, "role", str)),
        typed(raw, "group", int),
        tuple(typed({"alias": alias}, "alias", str) for alias in raw.get("aliases", ())),
        raw.get("treatment"),
    )
