"""The arrays of one shard: weights, optimizer state and staged pushes."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Protocol

import torch
from torch import Tensor

from pscommon.core.errors import InvalidRequestError, SnapshotError
from pscommon.core.model_spec import ITEMSIZE, ROLES, ModelSpec, OptimizerSettings, Role, Scalar
from pscommon.core.partition import ByteRange, PartitionPlan, TrainableRange, cut
from pscommon.optim.specs import (
    Groups,
    Scalars,
    all_groups_from_json,
    validate_model,
)
from pscommon.parameters.means import mean_of_values, scale_shares, share_of_samples
from pscommon.parameters.optimizer import FlatOptimizer, StateReader
from pscommon.parameters.partition import (
    RoleBuffers,
    ShardPartition,
    WorkerBuffer,
    raw,
)
from pscommon.parameters.state_images import StateImages, numbers_from_json
from pscommon.system.thread_team import ALONE, ThreadTeam
from pscommon.wire.push import Part
from psserver.parameters.gradient_mean import GradientMean
from psserver.parameters.push_groups import MAX_CACHED_TEXTS, parse_groups, read_groups
from psserver.parameters.staging import Staging, StagingPool, find_non_finite
from psserver.parameters.weight_reads import WeightRead, WeightReads

STEP_ROLES: tuple[Role, ...] = ("trainable", "buffer")


class PartReader(StateReader, Protocol):
    """A source that the store can be restored from; "weight" is the kind of the weights."""

    def groups_json(self) -> str: ...


class ParameterStore:
    """One shard's partition of the model, and the computations on it.

    Only `allocate_staging`, `find_non_finite` and `release` are thread-safe.

    Memory: the weights, the optimizer state from the first step on, the stagings in use (means are
    computed in place), and one copy of the weights for each older version that is still being sent.

    plan: how the model is partitioned over the shards.
    shards: number of shards.
    step_nbytes: bytes of a push, and of a pull.
    parse_groups, read_groups: cached functions of push_groups.py.
    clipped: the optimizers whose updates have a clip norm.
    averaged_last: whether the newest update averaged several pushes.

    Raises UnsupportedOptimizerError or InvalidRequestError for an optimizer that it cannot run.
    """

    def __init__(self, plan: PartitionPlan, shard: int, team: ThreadTeam = ALONE) -> None:
        self.plan, self.shards = plan, plan.shards
        self._partition = ShardPartition(plan, shard)
        self.step_nbytes = self._partition.step_nbytes
        self._team = team
        self._weights = self._partition.split_packed(
            torch.zeros(self._partition.nbytes, dtype=torch.uint8)
        )
        self._pool = StagingPool(self._partition)
        self._mean = GradientMean(self._partition, self._pool, team)
        self._reads = WeightReads(self._copy_step_weights, self._pool.return_buffers)
        self._applied = 0
        self._last_changed = dict.fromkeys(self._partition.trainable, 0)
        self._all_changed = 0
        self._model = validate_model(plan.spec)
        self._parts, self._trainable = self._model.parts(), self._model.trainable_of()
        most_texts = MAX_CACHED_TEXTS * len(self._parts)
        self.parse_groups = lru_cache(most_texts)(partial(parse_groups, self._parts))
        self.read_groups = lru_cache(most_texts)(partial(read_groups, self._parts))
        self.clipped, self.averaged_last = clipped_optimizers(plan.spec), False
        self._optimizers = {
            name: FlatOptimizer(
                self._partition, self._weights, self.settings(name), team, groups.start
            )
            for name, groups in plan.spec.group_ranges().items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes of weights."""
        return self._partition.nbytes

    @property
    def state_nbytes(self) -> int:
        """Bytes of optimizer state."""
        return sum(optimizer.nbytes for optimizer in self._optimizers.values())

    def allocate_staging(
        self, absent: Collection[int] = (), initial: bool = False, parts: Sequence[Part] = ()
    ) -> Staging:
        """Return memory for a push without the tensors in `absent`, or for all weights if
        `initial`.

        parts: Those that the push names; empty: none.

        Give it back with `release`. Raises InvalidRequestError if an absent index is not that of a
        trainable tensor, or if the parts do not fit.
        """
        return self._pool.allocate(absent, initial, parts)

    def stage_worker_buffer(
        self,
        buffer: WorkerBuffer,
        absent: Collection[int],
        initial: bool = False,
        parts: Sequence[Part] = (),
    ) -> Staging:
        """Return the staging of a complete push in a worker's shared buffer."""
        return Staging(
            self._partition,
            buffer.find_ranges(self._partition),
            self._pool.check_absent(absent),
            initial,
            is_server_memory=False,
            parts=parts,
        )

    def stage_nothing(self) -> Staging:
        """Return the staging of a push without bytes (policy allreduce)."""
        every = frozenset[int]().union(*self._trainable.values())
        return Staging(self._partition, RoleBuffers({}, {}), every, is_server_memory=False)

    def check_optimizer(self, staging: Staging, name: str) -> None:
        """Raise InvalidRequestError if a push cannot be a step of this optimizer."""
        if name not in self._parts:
            names = (
                ", ".join(map(repr, self._parts)) if "" not in self._parts else "one without name"
            )
            raise InvalidRequestError(f"the job has no optimizer {name!r}, but {names}")
        for other, tensors in self._trainable.items():
            if other != name and not tensors <= staging.absent:
                tensor = self._partition.name(min(tensors - staging.absent))
                raise InvalidRequestError(
                    f"a step of optimizer {name} has a gradient of {tensor}, which belongs to "
                    f"optimizer {other}"
                )

    def has_gradients(self, staging: Staging) -> bool:
        """Return whether a push has gradients on this shard."""
        return staging.absent_here != self._partition.trainable

    def settings(self, name: str) -> OptimizerSettings:
        """Return an optimizer with all hyper-parameters, as the job began."""
        return self._parts[name].settings

    def release(self, staging: Staging) -> None:
        """Free a staging's memory; its views must no longer be written."""
        self._pool.free(staging)

    def owns(self, staging: Staging) -> bool:
        """Return whether the staging was made for this store's partition."""
        return staging.partition is self._partition

    def find_non_finite(self, staging: Staging) -> str:
        """Return the name of the first tensor with NaN or Inf in the push."""
        return find_non_finite(staging, self._weights, self._team)

    def square_norm(
        self,
        stagings: Sequence[Staging],
        samples: Sequence[int] = (1,),
        scales: Sequence[float] = (),
    ) -> float:
        """Return the sum of squares, in float64, of the mean that `apply` would step with."""
        factors = scale_shares(share_of_samples(samples), scales)
        return self._mean.square_norm(stagings, factors)

    def set_initial_weights(self, staging: Staging) -> None:
        """Copy the initial weights from a staging."""
        initial = staging.require_memory()
        for role in ROLES:
            self._weights[role].copy_(initial[role])

    def take_upload(self, staging: Staging) -> None:
        """Take the weights and the optimizer state that only workers had (policy allreduce)."""
        self._reads.freeze()
        self.set_initial_weights(staging)
        (optimizer,) = self._optimizers.values()
        if staging.groups is not None:
            optimizer.groups = staging.groups.values
        images = {name: raw(state) for name, state in staging.states.items()}
        numbers = numbers_from_json(staging.state_json)
        start = self._partition.ranges["trainable"].start
        optimizer.restore(StateImages(images, numbers, start))
        self._count_changes(frozenset())

    def set_buffers(self, staging: Staging) -> None:
        """Copy the buffers without an average from a staging."""
        self._reads.freeze()
        view = self._partition.view_segment
        for segment in self._partition.segments["buffer"]:
            if segment.is_first:
                view(self._weights, segment).copy_(view(staging.require_memory(), segment))

    def apply(
        self,
        stagings: Sequence[Staging],
        samples: Sequence[int],
        scales: Sequence[float] = (),
        optimizer: str = "",
        groups: Groups | None = None,
    ) -> None:
        """Make one optimizer step with the mean of the pushes, summed in this order.

        samples: weight of each push in the mean, at least 1.
        scales: additional factor of each push's gradients; empty: 1.
        optimizer: name of the optimizer that steps.
        groups: its hyper-parameters; None: those of its update before.

        A tensor without a gradient in some pushes counts as zero there; one without any gradient is
        not changed. Overwrites the stagings' contents.
        """
        if not stagings or min(samples) < 1:
            raise ValueError(f"cannot average {len(stagings)} pushes with samples {list(samples)}")
        shares = share_of_samples(samples)
        self.averaged_last = len(stagings) > 1
        untouched = frozenset.intersection(*(staging.absent_here for staging in stagings))
        stepping = self._optimizers[optimizer]
        if groups is not None:
            stepping.groups = groups
        self._reads.freeze()
        with self._mean.sum_gradients(stagings, scale_shares(shares, scales)) as gradients:
            stepping.step(gradients, untouched)
        view = self._partition.view_segment
        for segment in self._partition.segments["buffer"]:
            sources = stagings[:1] if segment.is_first else stagings
            values = [view(staging.require_memory(), segment) for staging in sources]
            mean_of_values(view(self._weights, segment), values, shares)
        self._count_changes(untouched)

    def _count_changes(self, untouched: frozenset[int]) -> None:
        """Note the update in which each tensor last changed; usually one number for all tensors."""
        self._applied += 1
        if not untouched:
            self._all_changed = self._applied
        for tensor in self._partition.trainable - untouched if untouched else ():
            self._last_changed[tensor] = self._applied

    def find_unchanged(self, updates: int) -> frozenset[int]:
        """Return the trainable tensors of this shard that the last `updates` updates did not
        change.
        """
        since = self._applied - updates
        if since < self._all_changed:
            return frozenset()
        return frozenset(
            tensor for tensor, changed in self._last_changed.items() if changed <= since
        )

    def read(
        self, anything: bool = True, everything: bool = False, unchanged: Collection[int] = ()
    ) -> WeightRead:
        """Open a read of the current weights. Call it while nothing is applied, and close the read.

        The order is that of the wire: buffers, trainable tensors except `unchanged`, and frozen
        ones if `everything`; no weights at all unless `anything`.
        """
        return self._reads.open(
            self._weights, self._select_ranges(everything, unchanged) if anything else []
        )

    def copy_to(
        self, buffer: WorkerBuffer, everything: bool = False, unchanged: Collection[int] = ()
    ) -> int:
        """Copy the weights that `read` would read to a worker's buffer; return the bytes copied."""
        source, target, copied = self._weights, buffer.find_ranges(self._partition), 0

        def copy(span: ByteRange) -> None:
            target.bytes_of(span).copy_(source.bytes_of(span))

        for span in self._select_ranges(everything, unchanged):
            count = self._team.parts(span.nbytes)
            self._team.map(copy, cut(span, count) if count > 1 else [span])
            copied += span.nbytes
        return copied

    def _select_ranges(self, everything: bool, unchanged: Collection[int]) -> list[ByteRange]:
        ranges = self._partition.ranges
        trainable = self.plan.without(ranges["trainable"], unchanged)
        frozen = [ranges["frozen"]] if everything else []
        return [span for span in (ranges["buffer"], *trainable, *frozen) if span.start < span.stop]

    def _copy_step_weights(self) -> RoleBuffers:
        """Return a copy of the weights that an update may change."""
        buffers = self._pool.take_buffers()
        copies = {role: buffers[role].copy_(self._weights[role]) for role in STEP_ROLES}
        return RoleBuffers(copies, buffers.ranges)

    def groups(self) -> tuple[Mapping[str, Scalar], ...]:
        """Return the current hyper-parameters of each parameter group of the model."""
        return tuple(group for each in self._optimizers.values() for group in each.groups)

    def steps(self) -> dict[int, int]:
        """Return the optimizer steps of each trainable tensor on this shard, by index into the
        model.

        A tensor without a gradient makes no step. SGD without momentum has no state and counts
        none.
        """
        return {
            tensor: count
            for optimizer in self._optimizers.values()
            for tensor, count in optimizer.steps().items()
        }

    def scalars(self) -> Scalars:
        """Return the optimizer's values kept once per tensor (NAdam's mu_product)."""
        merged: dict[str, dict[int, float]] = {}
        for optimizer in self._optimizers.values():
            for name, values in optimizer.scalars().items():
                merged.setdefault(name, {}).update(values)
        return merged

    def export(self, into: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return copies of all arrays, flat and typed, by "<kind>@<start in the flat buffer>".

        kind: "weight" or torch's name of an optimizer state.
        into: an earlier export, whose memory is reused.
        """
        into, copies = into or {}, {}
        for key, tensor in self.tensors():
            old = into.get(key)
            copies[key] = (
                old.copy_(tensor)
                if old is not None and old.shape == tensor.shape
                else tensor.clone()
            )
        return copies

    def restore(self, reader: PartReader) -> None:
        """Load a snapshot written by any number of shards.

        Raises SnapshotError if weights are missing.
        """
        for name, groups in all_groups_from_json(reader.groups_json(), self._model).items():
            self._optimizers[name].groups = groups
        view = self._partition.view_segment
        for segment in self._segments():
            start, stop = segment.start, segment.stop
            if not reader.read("weight", start, stop, raw(view(self._weights, segment))):
                raise SnapshotError(
                    f"the snapshot lacks weights in bytes {start} to {stop} of the flat buffer"
                )
        for optimizer in self._optimizers.values():
            optimizer.restore(reader)

    def _segments(self) -> Iterator[TrainableRange]:
        for role in ROLES:
            yield from self._partition.segments[role]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all arrays, flat and typed, by their names in `export`."""
        for segment in self._segments():
            weights = self._partition.view_segment(self._weights, segment)
            yield f"weight@{segment.start}", weights
        for optimizer in self._optimizers.values():
            for kind, start, tensor in optimizer.state():
                yield f"{kind}@{start}", tensor


def clipped_optimizers(model: ModelSpec) -> frozenset[str]:
    """Return the names of the optimizers that have a clip norm."""
    return frozenset(
        name for name, settings in model.optimizers.items() if settings.clip_norm is not None
    )


def count_elements(plan: PartitionPlan, shard: int) -> int:
    """Return the number of the model's elements on this shard."""
    slices = [piece for role in ROLES for piece in plan.slices(plan.range(shard, role))]
    return sum(
        (piece.stop - piece.start) // ITEMSIZE[plan.spec.tensors[piece.tensor].dtype]
        for piece in slices
    )
