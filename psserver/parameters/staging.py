"""Pushes between their arrival and the update that applies them: their memory, and its checks."""

import math
import threading
from collections.abc import Callable, Collection, Sequence

import torch

from pscommon.core.errors import InvalidRequestError
from pscommon.core.model_spec import OptimizerSettings
from pscommon.core.partition import ByteRange, cut
from pscommon.optim import KINDS
from pscommon.optim.specs import Groups
from pscommon.parameters.finite_values import find_in_buffers, find_in_gradients, is_finite
from pscommon.parameters.partition import RoleBuffers, SameGradientRange, ShardPartition, raw
from pscommon.parameters.state_images import numbers_from_json
from pscommon.system.thread_team import ThreadTeam
from pscommon.wire.push import Part
from psserver.parameters.push_groups import PushGroups


class MemoryClaim:
    """Bytes for one worker, waiting or granted.

    wake: called, without waiting, when the claim may be granted.
    is_push: they are for a push; otherwise for a pull.
    """

    __slots__ = ("is_push", "nbytes", "wake", "worker")

    def __init__(self, worker: int, nbytes: int, wake: Callable[[], None], is_push: bool) -> None:
        self.is_push = is_push
        self.worker = worker
        self.nbytes = nbytes
        self.wake = wake


class Staging:
    """One push, or one upload of initial weights, of one worker on this shard.

    memory: the ranges, with gaps for absent tensors, so that all pushes line up; None once
        released.
    is_server_memory: the server may overwrite it. Otherwise it is the memory of a worker, which
        waits until the push is decided.
    views: writable bytes to fill one after another with received data; empty in a worker's memory.
    absent: trainable tensors (indices into the model) without a gradient in this push.
    initial: whether it has all weights, frozen ones too: the initial ones, or an upload.
    states: bytes of the optimizer states of an upload, which lie like the trainable tensors.
    named_parts: the parts that its header names, in the order of its data; empty: none.
    groups: hyper-parameters sent with the push; None if there are none.
    state_json: of an upload, the optimizer state with one number per tensor.
    claim: claim on the memory budget.
    partition: the partition of the model that the push is for.
    nbytes: bytes of the push.
    """

    def __init__(
        self,
        partition: ShardPartition,
        memory: RoleBuffers,
        absent: frozenset[int],
        initial: bool = False,
        is_server_memory: bool = True,
        parts: Sequence[Part] = (),
    ) -> None:
        """Create the staging of a push. parts: those that its header names, if any.

        Raises InvalidRequestError if they are not the bytes of a push without named parts.
        """
        self.memory: RoleBuffers | None = memory
        self.is_server_memory = is_server_memory
        self.absent = absent
        self.initial = initial
        self.groups: PushGroups | None = None
        self.state_json = ""
        self.claim: MemoryClaim | None = None
        self.partition = partition
        self.named_parts = tuple(parts)
        self._ranges = partition.pushed_ranges(absent, initial)
        self.states: dict[str, torch.Tensor] = {}
        if parts:
            named = tuple(span for part in parts if not part.state for span in part.ranges)
            _check_ranges(named, self._ranges)
            self._ranges = named
            self._add_states(parts)
        self.views = self.contents if is_server_memory else []
        self.nbytes = sum(span.nbytes for span in self._ranges)
        self.nbytes += sum(state.nbytes for state in self.states.values())
        self._gradients = (
            _find_single_dtype(partition, memory, absent)
            if is_server_memory and not parts
            else None
        )
        self._checked_count, self._finite = 0, True

    def _add_states(self, parts: Sequence[Part]) -> None:
        """Make room for the optimizer states of an upload, which follow the weights."""
        trainable = self.partition.ranges["trainable"]
        for part in parts:
            if part.state in self.states or (self.states and not part.state):
                raise InvalidRequestError(
                    "the parts of an upload must be the weights, then each state once"
                )
            if part.state:
                _check_ranges(part.ranges, [trainable])
                self.states[part.state] = torch.empty(trainable.nbytes, dtype=torch.uint8)

    def close(self, absent: Collection[int]) -> None:
        """Set the absent tensors of a push that is complete. Errors as in StagingPool.allocate."""
        self.absent = _check_absent(self.partition, absent)
        self._ranges = self.partition.pushed_ranges(self.absent, self.initial)

    @property
    def required_ranges(self) -> list[tuple[int, int]]:
        """The ranges of `views` that an open push must fill, given its absent tensors."""
        trainable, buffers = (
            self.partition.ranges["trainable"],
            self.partition.ranges["buffer"].nbytes,
        )
        spans = self.partition.plan.without(trainable, self.absent)
        gradients = [(start - trainable.start, stop - trainable.start) for start, stop in spans]
        return [*gradients, (trainable.nbytes, trainable.nbytes + buffers)]

    def mark_filled(self, nbytes: int) -> None:
        """Check the new ones of the first `nbytes` bytes for NaN and Inf while they are in the
        cache.
        """
        if self._gradients is not None:
            stop = min(nbytes // self._gradients.element_size(), len(self._gradients))
            if stop > self._checked_count:
                self._finite = self._finite and math.isfinite(
                    self._gradients[self._checked_count : stop].sum().item()
                )
                self._checked_count = stop

    @property
    def gradients_are_finite(self) -> bool:
        """True if all gradients were checked and are finite; False if this is unknown."""
        return (
            self._gradients is not None
            and self._finite
            and self._checked_count == len(self._gradients)
        )

    def require_memory(self) -> RoleBuffers:
        """Return the memory. Raises ValueError if it was released."""
        if self.memory is None:
            raise ValueError("this staging was released")
        return self.memory

    @property
    def absent_here(self) -> frozenset[int]:
        """The absent tensors that have bytes on this shard."""
        return self.absent & self.partition.trainable

    @property
    def contents(self) -> list[memoryview]:
        """The bytes of the parts, in the order of the data."""
        memory = self.require_memory()
        states = [raw(state) for state in self.states.values() if len(state)]
        return [*(memory.raw(span) for span in self._ranges), *states]

    def release(self) -> RoleBuffers | None:
        """Give up the memory. Return it at the first call, then None."""
        memory, self.memory = self.memory, None
        self.views, self._gradients, self.states = [], None, {}
        return memory


def _check_absent(partition: ShardPartition, absent: Collection[int]) -> frozenset[int]:
    tensors = partition.plan.spec.tensors
    for index in absent:
        if not 0 <= index < len(tensors) or tensors[index].role != "trainable":
            raise InvalidRequestError(
                f"absent: {index} is not a trainable tensor of the model's {len(tensors)}"
            )
    return frozenset(absent)


def _check_ranges(named: Sequence[ByteRange], expected: Sequence[ByteRange]) -> None:
    """Check that named parts have the bytes of the expected ones, each byte once."""
    found = sorted(named, reverse=True)
    for start, stop in sorted(expected):
        position = start
        while position < stop and found and position == found[-1].start < found[-1].stop <= stop:
            position = found.pop().stop
        if position < stop:
            raise InvalidRequestError(
                f"the parts of the push must have bytes {position} to {stop} once"
            )
    if found:
        raise InvalidRequestError(
            f"the parts of the push must not have bytes {found[-1].start} to {found[-1].stop}"
        )


def _find_single_dtype(
    partition: ShardPartition, memory: RoleBuffers, absent: frozenset[int]
) -> torch.Tensor | None:
    """Return the gradients as one flat tensor if they have one dtype and no gaps."""
    if partition.only_dtype is None or not partition.trainable.isdisjoint(absent):
        return None
    return partition.view(memory, partition.only_dtype, *partition.ranges["trainable"])


class StagingPool:
    """Allocates stagings and reuses their buffers: fresh memory costs more than the copy into it.

    Thread-safe. It has as many buffers as were ever in use at once.
    """

    def __init__(self, partition: ShardPartition) -> None:
        self._partition = partition
        self._free_buffers: list[RoleBuffers] = []
        self._lock = threading.Lock()

    def allocate(
        self, absent: Collection[int], initial: bool, parts: Sequence[Part] = ()
    ) -> Staging:
        """Return a staging with undefined contents.

        Raises InvalidRequestError if an absent index is not that of a trainable tensor, or if the
        parts do not fit.
        """
        absent_set = self.check_absent(absent)
        if not initial:
            return Staging(self._partition, self.take_buffers(), absent_set, parts=parts)
        everything = torch.empty(self._partition.nbytes, dtype=torch.uint8)
        packed = self._partition.split_packed(everything)
        return Staging(self._partition, packed, absent_set, initial, parts=parts)

    def take_buffers(self) -> RoleBuffers:
        """Return buffers for trainable tensors and buffers, contents undefined; see
        `return_buffers`.
        """
        with self._lock:
            if self._free_buffers:
                return self._free_buffers.pop()
        return self._partition.split_packed(
            torch.empty(self._partition.step_nbytes, dtype=torch.uint8)
        )

    def return_buffers(self, memory: RoleBuffers) -> None:
        """Take buffers back; the caller may no longer access them."""
        with self._lock:
            self._free_buffers.append(memory)

    def free(self, staging: Staging) -> None:
        """Take a staging's buffers back. Repeating it is harmless."""
        memory = staging.release()
        if (
            memory is not None
            and staging.is_server_memory
            and not staging.initial
            and staging.partition is self._partition
        ):
            self.return_buffers(memory)

    def check_absent(self, absent: Collection[int]) -> frozenset[int]:
        """Return the indices as a set; errors as in `allocate`."""
        return _check_absent(self._partition, absent)


def find_non_finite(staging: Staging, weights: RoleBuffers, team: ThreadTeam) -> str:
    """Return the name of the first tensor with NaN or Inf in a push; empty if there is none.

    Checks gradients and floating buffers; of initial weights only the trainable ones. A buffer may
    have such a value where the weights have one (an attention mask's -inf). Thread-safe.
    """
    partition, memory = staging.partition, staging.require_memory()

    def is_piece_finite(piece: SameGradientRange) -> bool:
        parts = cut(piece.span, team.parts(piece.span.nbytes))
        return all(
            team.map(lambda part: is_finite(partition.view(memory, piece.dtype, *part)), parts)
        )

    found = ""
    if not staging.gradients_are_finite:
        found = find_in_gradients(partition, memory, staging.absent_here, is_piece_finite)
    return found or ("" if staging.initial else find_in_buffers(partition, memory, weights))


def replace_non_finite(staging: Staging) -> None:
    """Replace NaN and Inf in the gradients by zeros."""
    partition = staging.partition
    for piece in partition.pieces((staging.absent_here,)):
        view = partition.view(staging.require_memory(), piece.dtype, *piece.span)
        view.nan_to_num_(0.0, 0.0, 0.0)


def check_upload(
    settings: OptimizerSettings, groups: Groups, states: Collection[str], state_json: str
) -> None:
    """Raise InvalidRequestError if the servers cannot continue with an upload.

    Args:
        settings: The job's optimizer.
        groups: Its hyper-parameters as of the upload.
        states: Names of the optimizer states that the upload has.
        state_json: State with one number per tensor.
    """
    kind = KINDS[settings.name]
    try:
        steps, scalars = numbers_from_json(state_json)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidRequestError(f"upload refused: cannot read its state: {error!r}") from None
    stepped = {index for index, count in steps.items() if count}
    needed = {state.name for group in groups for state in kind.states_of(group)}
    known = {state.name for state in kind.states}
    if unknown := sorted({*states} - known):
        raise InvalidRequestError(f"upload refused: {settings.name} has no {', '.join(unknown)}")
    if stepped and (missing := sorted(needed.difference(states))):
        raise InvalidRequestError(f"upload refused: it lacks {', '.join(missing)}")
    for scalar in kind.scalars:
        if stepped - scalars.get(scalar.name, {}).keys():
            raise InvalidRequestError(f"upload refused: it lacks {scalar.name} of some tensors")
