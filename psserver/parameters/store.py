"""All numbers of one shard: weights, optimizer state, and the pushes that wait to be counted."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from pscommon.core.errors import SnapshotError
from pscommon.core.model_spec import ITEMSIZE, ROLES, Role, Scalar
from pscommon.core.partition import ByteRange, PartitionPlan, TrainableRange, cut
from pscommon.optim.specs import Scalars, groups_from_json, validate
from pscommon.system.thread_team import ALONE, ThreadTeam
from psserver.parameters.averaging import mean_of_values, sum_gradients
from psserver.parameters.gradient_norms import MeanBlock, mean_blocks, squares, total
from psserver.parameters.optimizer import FlatOptimizer, StateReader
from psserver.parameters.partition import (
    DTYPES,
    RoleBuffers,
    SameGradientRange,
    ShardPartition,
    Span,
    WorkerBuffer,
    raw,
)
from psserver.parameters.staging import Staging, StagingPool
from psserver.parameters.weight_reads import WeightRead, WeightReads

STEP_ROLES: tuple[Role, ...] = ("trainable", "buffer")


class PartReader(StateReader, Protocol):
    """A snapshot, as the store reads it; "weight" is the kind of the weights themselves."""

    def groups_json(self) -> str: ...


class ParameterStore:
    """One shard's part of the tape and what happens to it. Only `staging`, `find_non_finite` and
    `release` are thread-safe.

    Memory: the weights, the optimizer's state from the first step on, the stagings in use, in
    whose place means are made, and a copy of the weights for each version that is still being
    sent after the next one was applied. clips: updates keep to a clip norm. averages: the newest
    one was of several pushes. Raises UnsupportedOptimizerError or InvalidRequestError for an
    optimizer that cannot be run.
    """

    def __init__(self, plan: PartitionPlan, shard: int, team: ThreadTeam = ALONE) -> None:
        self._stretch = ShardPartition(plan, shard)
        self._team = team
        self._weights = self._stretch.end_to_end(
            torch.zeros(self._stretch.nbytes, dtype=torch.uint8)
        )
        self._pool = StagingPool(self._stretch)
        self._readings = WeightReads(self._copy, self._pool.give_back)
        self._applied = 0
        self._changed = dict.fromkeys(self._stretch.trainable, 0)
        self._all_changed = 0
        self._like = validate(plan.spec.optimizer)
        self.clips, self.averages = self._like.clip_norm is not None, False
        self._optimizer = FlatOptimizer(self._stretch, self._weights, self._like, team)

    @property
    def plan(self) -> PartitionPlan:
        """How the model is dealt."""
        return self._stretch.plan

    @property
    def nbytes(self) -> int:
        """Bytes of weights."""
        return self._stretch.nbytes

    @property
    def step_nbytes(self) -> int:
        """Bytes of a push, and of a pull."""
        return self._stretch.step_nbytes

    @property
    def state_nbytes(self) -> int:
        """Bytes of optimizer state."""
        return self._optimizer.nbytes

    def staging(self, absent: Collection[int] = (), initial: bool = False) -> Staging:
        """Room for a push without the tensors in `absent`, or (initial) for all weights. Give it
        back with `release`.

        Raises InvalidRequestError where `absent` has an index that is not a trainable tensor's.
        """
        return self._pool.take(absent, initial)

    def staging_on(
        self, tape: WorkerBuffer, absent: Collection[int], initial: bool = False
    ) -> Staging:
        """A push, or (initial) all weights, that lies, complete, on a worker's tape."""
        return Staging(
            self._stretch, tape.of(self._stretch), self._pool.checked(absent), initial, ours=False
        )

    def release(self, staging: Staging) -> None:
        """The staging's memory may be used again; nobody may write to its views any more."""
        self._pool.give(staging)

    def owns(self, staging: Staging) -> bool:
        """Was it made for the part of the model that lies here?"""
        return staging.stretch is self._stretch

    def find_non_finite(self, staging: Staging) -> str:
        """The first tensor with NaN or Inf among the gradients and floating buffers, by name;
        empty: there is none.

        A buffer may hold such a value where the model's own buffer does (an attention mask's
        -inf). Of initial weights only the trainable ones are looked at.
        """
        memory = _memory(staging)
        pieces = (
            () if staging.gradients_are_finite else self._stretch.pieces((self._missing(staging),))
        )
        for piece in pieces:
            if not self._is_finite(memory, piece):
                for held in self._stretch.slices(piece.start, piece.stop):
                    if not _is_finite(
                        self._stretch.view(memory, piece.dtype, held.start, held.stop)
                    ):
                        return self._stretch.name(held.tensor)
        return "" if staging.initial else self._find_in_buffers(memory)

    def mend(self, staging: Staging) -> None:
        """Puts zeros for NaN and Inf in the gradients."""
        memory = _memory(staging)
        for piece in self._stretch.pieces((self._missing(staging),)):
            self._stretch.view(memory, piece.dtype, *piece.span).nan_to_num_(0.0, 0.0, 0.0)

    def square_norm(
        self,
        stagings: Sequence[Staging],
        samples: Sequence[int] = (1,),
        scales: Sequence[float] = (),
    ) -> float:
        """Return the sum of squares, in float64, of the mean that `apply` would step with.
        Nothing changes.
        """
        _, factors = _shares(samples, scales)
        memories = [_memory(staging) for staging in stagings]
        work: list[MeanBlock] = []
        for piece in self._stretch.pieces(tuple(self._missing(staging) for staging in stagings)):
            views = [
                self._stretch.view(memories[push], piece.dtype, *piece.span)
                for push in piece.holders
            ]
            work += mean_blocks(
                views, [factors[push] for push in piece.holders], self._stretch.padding(piece)
            )
        return total(chain.from_iterable(self._team.map(squares, work)))

    def begin(self, staging: Staging) -> None:
        """The initial weights."""
        given = _memory(staging)
        for role in ROLES:
            self._weights[role].copy_(given[role])

    def apply(
        self, stagings: Sequence[Staging], samples: Sequence[int], scales: Sequence[float] = ()
    ) -> None:
        """One optimizer step with the mean of the pushes, weighted by samples (each at least 1),
        summed in this order.

        scales: what each push's gradients are multiplied with besides; empty: 1. A tensor
        without a gradient in some pushes counts as zero there; one without a gradient in all of
        them is not touched. Uses the groups of the first staging that has them. The stagings'
        contents are used up.
        """
        if not stagings or min(samples) < 1:
            raise ValueError(f"cannot average {len(stagings)} pushes with samples {list(samples)}")
        shares, factors = _shares(samples, scales)
        self.averages = len(stagings) > 1
        memories = [_memory(staging) for staging in stagings]
        absent = tuple(self._missing(staging) for staging in stagings)
        self._optimizer.groups = next(
            (s.groups for s in stagings if s.groups is not None), self._optimizer.groups
        )
        self._readings.freeze()
        with self._room_for_sum(stagings, factors) as total:
            self._sum_gradients(total, memories, absent, factors)
            self._optimizer.step(total, frozenset.intersection(*absent))
        for segment in self._stretch.segments["buffer"]:
            values = [self._view(memory, segment) for memory in memories]
            mean_of_values(self._view(self._weights, segment), values, shares)
        self._count_changes(frozenset.intersection(*absent))

    @contextmanager
    def _room_for_sum(
        self, stagings: Sequence[Staging], factors: Sequence[float]
    ) -> Iterator[RoleBuffers]:
        """The first push's memory, which has room for every tensor, its own or not; a worker's
        is not written to.
        """
        if list(factors) == [1.0] or stagings[0].ours:
            yield _memory(stagings[0])
            return
        room = self._pool.borrow()
        try:
            yield room
        finally:
            self._pool.give_back(room)

    def _count_changes(self, untouched: frozenset[int]) -> None:
        """Notes when each tensor changed last; in the common case, all of them, that is one
        number.
        """
        self._applied += 1
        if not untouched:
            self._all_changed = self._applied
        for tensor in self._stretch.trainable - untouched if untouched else ():
            self._changed[tensor] = self._applied

    def unchanged(self, updates: int) -> frozenset[int]:
        """Trainable tensors of this shard that the last `updates` updates have not touched."""
        since = self._applied - updates
        if since < self._all_changed:
            return frozenset()
        return frozenset(tensor for tensor, changed in self._changed.items() if changed <= since)

    def read(
        self, anything: bool = True, everything: bool = False, unchanged: Collection[int] = ()
    ) -> WeightRead:
        """The current weights in the order of the wire: buffers, trainable ones but those in
        `unchanged`, and (everything) frozen ones too, or (not anything) none. Call it while
        nothing is applied, and close it."""
        return self._readings.open(
            self._weights, self._spans(everything, unchanged) if anything else []
        )

    def copy_to(
        self, tape: WorkerBuffer, everything: bool = False, unchanged: Collection[int] = ()
    ) -> int:
        """As read, onto a worker's tape; returns the bytes copied."""
        target, copied = tape.of(self._stretch), 0
        for role, start, stop in self._spans(everything, unchanged):
            self._copy_span(self._weights[role], target[role], start, stop)
            copied += stop - start
        return copied

    def _copy_span(self, source: Tensor, target: Tensor, start: int, stop: int) -> None:
        if stop - start == len(source) and self._team.parts(stop - start) == 1:
            target.copy_(source)  # two slices less
            return
        parts = cut(ByteRange(start, stop), self._team.parts(stop - start))
        self._team.map(lambda part: target[slice(*part)].copy_(source[slice(*part)]), parts)

    def _spans(self, everything: bool, unchanged: Collection[int]) -> list[Span]:
        stretch = self._stretch
        frozen = [stretch.span("frozen")] if everything else []
        spans = [stretch.span("buffer"), *stretch.trainable_spans(unchanged), *frozen]
        return [span for span in spans if span[1] < span[2]]

    def _copy(self) -> RoleBuffers:
        """What steps; what is frozen never changes."""
        room = self._pool.borrow()
        return RoleBuffers({role: room[role].copy_(self._weights[role]) for role in STEP_ROLES})

    def groups(self) -> tuple[Mapping[str, Scalar], ...]:
        """Hyper-parameters of each parameter group as they stand."""
        return self._optimizer.groups

    def steps(self) -> dict[int, int]:
        """Optimizer steps of each trainable tensor on this shard, by index into the model's
        tensors.

        Tensors without a gradient lag behind; SGD without momentum, which keeps no state, counts
        none.
        """
        return self._optimizer.steps()

    def scalars(self) -> Scalars:
        """Return what the optimizer keeps once for each tensor (NAdam's mu_product); empty for
        most optimizers.
        """
        return self._optimizer.scalars()

    def export(self, into: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Copies of everything, one-dimensional and typed, by "<kind>@<start on the tape>".

        kind is "weight" or torch's name of an optimizer state. Memory of `into`, an earlier
        export, is used again.
        """
        into, copies = into or {}, {}
        for key, tensor in self.tensors():
            kept = into.get(key)
            copies[key] = (
                kept.copy_(tensor)
                if kept is not None and kept.shape == tensor.shape
                else tensor.clone()
            )
        return copies

    def restore(self, reader: PartReader) -> None:
        """Go on from a snapshot that any number of shards wrote. Raises SnapshotError if weights
        are missing.
        """
        self._optimizer.groups = groups_from_json(reader.groups_json(), self._like)
        for segment in self._segments():
            start, stop = segment.start, segment.stop
            if not reader.read("weight", start, stop, raw(self._view(self._weights, segment))):
                raise SnapshotError(
                    f"the snapshot does not hold all weights in bytes {start} to {stop} of the tape"
                )
        self._optimizer.restore(reader)

    def _missing(self, staging: Staging) -> frozenset[int]:
        """Absent tensors that matter on this shard."""
        return staging.absent & self._stretch.trainable

    def _sum_gradients(
        self,
        total: RoleBuffers,
        memories: list[RoleBuffers],
        absent: tuple[frozenset[int], ...],
        factors: list[float],
    ) -> None:
        if factors == [1.0] and memories[0] is total:
            return
        for piece in self._stretch.pieces(absent):
            for_each = partial(self._sum_part, piece, total, memories, factors)
            self._team.map(
                for_each, cut(piece.span, self._team.parts(piece.span.nbytes * len(memories)))
            )

    def _sum_part(
        self,
        piece: SameGradientRange,
        total: RoleBuffers,
        memories: list[RoleBuffers],
        factors: list[float],
        part: ByteRange,
    ) -> None:
        target, *views = [
            self._stretch.view(memory, piece.dtype, *part) for memory in (total, *memories)
        ]
        sum_gradients(
            target,
            [views[push] for push in piece.holders],
            [factors[push] for push in piece.holders],
        )

    def _is_finite(self, memory: RoleBuffers, piece: SameGradientRange) -> bool:
        def look(part: ByteRange) -> bool:
            return _is_finite(self._stretch.view(memory, piece.dtype, *part))

        return all(self._team.map(look, cut(piece.span, self._team.parts(piece.span.nbytes))))

    def _find_in_buffers(self, memory: RoleBuffers) -> str:
        for segment in self._stretch.segments["buffer"]:
            dtype = DTYPES[segment.dtype]
            if not dtype.is_floating_point or _is_finite(self._view(memory, segment)):
                continue
            for held in self._stretch.slices(segment.start, segment.stop):
                new, old = (
                    self._stretch.view(m, dtype, held.start, held.stop)
                    for m in (memory, self._weights)
                )
                if bool((old.isfinite() & ~new.isfinite()).any()):
                    return self._stretch.name(held.tensor)
        return ""

    def _view(self, memory: RoleBuffers, segment: TrainableRange) -> Tensor:
        return self._stretch.view(memory, DTYPES[segment.dtype], segment.start, segment.stop)

    def _segments(self) -> Iterator[TrainableRange]:
        for role in ROLES:
            yield from self._stretch.segments[role]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for segment in self._segments():
            yield f"weight@{segment.start}", self._view(self._weights, segment)
        for kind, start, tensor in self._optimizer.state():
            yield f"{kind}@{start}", tensor


def _shares(samples: Sequence[int], scales: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return each push's weight in the mean, and the factor of its gradients: the weight times
    the scale.
    """
    total_samples = sum(samples)
    shares = [count / total_samples for count in samples]
    return shares, [
        share * scale for share, scale in zip(shares, scales, strict=True)
    ] if scales else shares


def _memory(staging: Staging) -> RoleBuffers:
    if staging.memory is None:
        raise ValueError("this staging was released")
    return staging.memory


def _is_finite(flat: Tensor) -> bool:
    """NaN and Inf survive a sum, which takes one fast pass; a sum that overflowed is told apart
    by the extremes.
    """
    return math.isfinite(flat.sum().item()) or all(
        math.isfinite(extreme.item()) for extreme in torch.aminmax(flat)
    )


def numbers_of(plan: PartitionPlan, shard: int) -> int:
    """How many numbers of the model lie on this shard."""
    held = [piece for role in ROLES for piece in plan.slices(plan.range(shard, role))]
    return sum(
        (piece.stop - piece.start) // ITEMSIZE[plan.spec.tensors[piece.tensor].dtype]
        for piece in held
    )
