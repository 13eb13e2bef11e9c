"""Run torch.optim on long ranges of the flat buffer instead of on single tensors.

The optimizers here treat each element by itself. So adjacent tensors can step as one if they have
the same hyper-parameters, the same number of steps and equal scalars (NAdam's mu_product). Usually
this gives one run per dtype and parameter group. A tensor without a gradient in a round is left
out, as torch leaves out a parameter whose grad is None: its weight, its state and its step count
stay the same.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pscommon.core.errors import SnapshotError
from pscommon.core.model_spec import OptimizerSettings
from pscommon.core.partition import ByteRange, TrainableRange, cut, padded
from pscommon.optim import KINDS, OptimizerKind, OptimizerState, Rows
from pscommon.optim.specs import Groups, Scalars
from pscommon.parameters.partition import DTYPES, RoleBuffers, ShardPartition, blocks, raw
from pscommon.system.thread_team import ALONE, ThreadTeam

MAX_CACHED_PASSES = 8
"""Prepared sets of runs that are kept: a script that trains its parts in turn returns to each."""


class StateReader(Protocol):
    """A source of optimizer state, independent of the number of shards that wrote it."""

    def read(self, kind: str, start: int, stop: int, out: memoryview) -> bool:
        """Fill `out` with bytes [start, stop) of this kind; return False if not all are stored."""
        ...

    def kinds(self) -> set[str]: ...

    def steps(self) -> dict[int, int]: ...

    def scalars(self) -> Scalars: ...


class OptimizerRun(NamedTuple):
    """Tensors that step as one.

    first, last: range of indices into the shard's trainable slices.
    start, stop: range of bytes in the flat buffer.
    segment: index into the optimizer's trainable segments.
    """

    first: int
    last: int
    start: int
    stop: int
    segment: int


class FlatOptimizer:
    """The optimizer of one shard's weights. Not thread-safe.

    spec: validated settings. Its groups are the hyper-parameters until `groups` is assigned.
    first_group: index of its first group among the groups of all optimizers of the model.

    State is created when it is first needed, for a whole parameter group, on all shards at the same
    step.
    """

    def __init__(
        self,
        partition: ShardPartition,
        weights: RoleBuffers,
        spec: OptimizerSettings,
        team: ThreadTeam = ALONE,
        first_group: int = 0,
    ) -> None:
        self.groups: Groups = spec.groups
        self._kind = KINDS[spec.name]
        self._team = team
        self._partition = partition
        self._weights = weights
        self._segments = [
            segment._replace(group=segment.group - first_group)
            for segment in partition.segments["trainable"]
            if 0 <= segment.group - first_group < len(spec.groups)
        ]
        self._slices = [
            (tensor_slice, index)
            for index, segment in enumerate(self._segments)
            for tensor_slice in partition.slices(segment.start, segment.stop)
        ]
        self._steps = torch.zeros(len(self._slices), dtype=torch.int64)
        # meaningless for tensors without steps
        self._scalars = {
            each.name: torch.zeros(len(self._slices), dtype=torch.float32)
            for each in self._kind.scalars
        }
        self._state: list[dict[str, Tensor]] = [{} for _ in self._segments]
        self._passes: dict[tuple[OptimizerRun, ...], _Passes] = {}
        self._last: tuple[frozenset[int], _Passes] | None = None

    def step(self, gradients: RoleBuffers, absent: frozenset[int]) -> None:
        """Step all tensors except those in `absent`."""
        states = self._create_state()
        runs, passes = self._select_passes(absent)
        self._team.map(
            lambda each: each.step(gradients, self.groups, self._steps, self._scalars), passes
        )
        if self._scalars:
            for each in passes:
                each.keep_scalars(self._scalars)
        for run in runs:
            if states[run.segment] or self._kind.counts_steps:
                self._steps[run.first : run.last] += 1

    @property
    def nbytes(self) -> int:
        """Bytes of optimizer state."""
        return sum(tensor.nbytes for state in self._state for tensor in state.values())

    def state(self) -> Iterator[tuple[str, int, Tensor]]:
        """Yield every state tensor: torch's name, its start in the flat buffer, the flat tensor."""
        for segment, state in zip(self._segments, self._state, strict=True):
            for name, tensor in state.items():
                yield name, segment.start, tensor

    def steps(self) -> dict[int, int]:
        """Return the steps of each tensor; steps without state (SGD without momentum) are not
        counted.
        """
        return {
            tensor_slice.tensor: count
            for (tensor_slice, _), count in zip(self._slices, self._steps.tolist(), strict=True)
        }

    def scalars(self) -> Scalars:
        """Return the scalars of each tensor that has made a step; empty without scalars."""
        stepped = [
            (place, tensor_slice.tensor)
            for place, (tensor_slice, _) in enumerate(self._slices)
            if self._steps[place]
        ]
        return {
            name: {index: float(values[place]) for place, index in stepped}
            for name, values in self._scalars.items()
        }

    def restore(self, reader: StateReader) -> None:
        """Load state and steps; set `groups` before. State that is not stored starts new."""
        steps, stored = reader.steps(), reader.kinds()
        self._steps = torch.tensor(
            [steps.get(tensor_slice.tensor, 0) for tensor_slice, _ in self._slices],
            dtype=torch.int64,
        )
        self._restore_scalars(reader.scalars() if self._scalars else {})
        self._passes, self._last = {}, None
        for segment, state in zip(self._segments, self._state, strict=True):
            state.clear()
            for each in self._kind.states:
                if each.name in stored:
                    tensor = self._initial(segment, each)
                    if reader.read(each.name, segment.start, segment.stop, raw(tensor)):
                        state[each.name] = tensor

    def _restore_scalars(self, stored: Scalars) -> None:
        for name, values in self._scalars.items():
            for place, (tensor_slice, _) in enumerate(self._slices):
                if self._steps[place]:
                    if tensor_slice.tensor not in stored.get(name, {}):
                        tensor = self._partition.name(tensor_slice.tensor)
                        raise SnapshotError(f"the snapshot has no {name} of {tensor}")
                    values[place] = stored[name][tensor_slice.tensor]

    def _create_state(self) -> list[tuple[OptimizerState, ...]]:
        """Create missing state for a step. Return the states that each segment needs."""
        states = []
        for segment, state in zip(self._segments, self._state, strict=True):
            all_needed = self._kind.states_of(self.groups[segment.group])
            for needed in all_needed:
                if needed.name not in state:
                    state[needed.name] = self._initial(segment, needed)
                    self._passes, self._last = {}, None
            states.append(all_needed)
        return states

    def _initial(self, segment: TrainableRange, state: OptimizerState) -> Tensor:
        dtype = DTYPES[segment.dtype]
        size = (segment.stop - segment.start) // dtype.itemsize
        is_set_now = state.initial and not self._kind.set_by_first_step(state)
        value: Any = self.groups[segment.group][state.initial] if is_set_now else 0.0
        # zeros, unlike full, takes no memory before it is written to
        return torch.full((size,), value, dtype=dtype) if value else torch.zeros(size, dtype=dtype)

    def _select_passes(self, absent: frozenset[int]) -> "_Passes":
        """Return the prepared passes. Tensors that stepped together stay together, so the runs
        change only with `absent`.
        """
        if self._last is None or self._last[0] != absent:
            runs = self._runs(absent)
            found = self._passes.get(runs)
            if found is None:
                if len(self._passes) == MAX_CACHED_PASSES:
                    self._passes.pop(next(iter(self._passes)))
                found = self._passes[runs] = runs, self._prepare(runs)
            self._last = absent, found
        return self._last[1]

    def _runs(self, absent: frozenset[int]) -> tuple[OptimizerRun, ...]:
        steps = self._steps if self._kind.by_step else self._steps.clamp(max=1)
        runs: list[OptimizerRun] = []
        before: tuple[Any, ...] | None = None
        columns = [values.where(self._steps > 0, 0.0).tolist() for values in self._scalars.values()]
        for place, ((tensor_slice, segment), *like) in enumerate(
            zip(self._slices, steps.tolist(), *columns, strict=True)
        ):
            if tensor_slice.tensor in absent:
                continue
            if before == (place, segment, *like):
                runs[-1] = runs[-1]._replace(last=place + 1, stop=padded(tensor_slice.stop))
            else:
                runs.append(
                    OptimizerRun(
                        place, place + 1, tensor_slice.start, padded(tensor_slice.stop), segment
                    )
                )
            before = (place + 1, segment, *like)
        return tuple(runs)

    def _prepare(self, runs: tuple[OptimizerRun, ...]) -> "list[_ThreadPass]":
        """Return one pass for each thread, with a span of every run."""
        parts = self._team.parts(sum(run.stop - run.start for run in runs))
        spans_of_runs = [cut(ByteRange(run.start, run.stop), parts) for run in runs]
        return [
            self._prepare_thread(list(zip(runs, spans, strict=True)))
            for spans in zip(*spans_of_runs, strict=True)
        ]

    def _prepare_thread(self, runs: list[tuple[OptimizerRun, ByteRange]]) -> "_ThreadPass":
        prepared = _ThreadPass(self._kind, self._partition)
        for run, span in runs:
            if not span.nbytes:
                continue
            segment = self._segments[run.segment]
            dtype = DTYPES[segment.dtype]
            first, last = ((position - segment.start) // dtype.itemsize for position in span)
            state = {name: tensor[first:last] for name, tensor in self._state[run.segment].items()}
            prepared.add(
                run, span, segment.group, self._partition.view(self._weights, dtype, *span), state
            )
        return prepared


_Passes = tuple[tuple[OptimizerRun, ...], "list[_ThreadPass]"]


class _FormulaCall(NamedTuple):
    """One call of the optimizer's formula.

    run: the tensors that step as one.
    span: the bytes of the run that this call steps.
    group: the parameter group.
    rows: views of the span's weights and state.
    """

    run: OptimizerRun
    span: ByteRange
    group: int
    rows: Rows


class _ThreadPass:
    """What one thread steps: a span of every run."""

    def __init__(self, kind: OptimizerKind, partition: ShardPartition) -> None:
        self._kind = kind
        self._partition = partition
        self._calls: list[_FormulaCall] = []

    def add(
        self,
        run: OptimizerRun,
        span: ByteRange,
        group: int,
        weights: Tensor,
        state: Mapping[str, Tensor],
    ) -> None:
        """Add a run, of which this thread steps `span`, with the span's weights and state."""
        columns = (weights, *state.values())
        fused = weights.dtype in self._kind.fused
        first, *others = (
            [*column] for column in zip(*([columns] if fused else blocks(*columns)), strict=True)
        )
        steps, *scalars = (
            [torch.zeros((), dtype=torch.float32) for _ in first]
            for _ in range(1 + len(self._kind.scalars))
        )
        named = {
            each.name: column for each, column in zip(self._kind.scalars, scalars, strict=True)
        }
        rows = Rows(first, dict(zip(state, others, strict=True)), named, steps, fused)
        self._calls.append(_FormulaCall(run, span, group, rows))

    def step(
        self, gradients: RoleBuffers, groups: Groups, steps: Tensor, scalars: Mapping[str, Tensor]
    ) -> None:
        """Step once; `steps` and `scalars` are the values of each slice before the step."""
        with torch.no_grad():
            for run, span, group, rows in self._calls:
                count = int(steps[run.first])
                now = {**groups[group], **(self._kind.first if count == 0 else {})}
                if self._kind.by_step:
                    for each in rows.steps:
                        each.fill_(count)
                for scalar in self._kind.scalars:
                    value = (
                        float(scalars[scalar.name][run.first]) if count else scalar.first_value(now)
                    )
                    for each in rows.scalars[scalar.name]:
                        each.fill_(value)
                if count == 0 and rows.state:
                    self._set_first_values(rows, now)
                self._kind.formula(rows, self._gradients(span, gradients, rows.weights), now)

    def _set_first_values(self, rows: Rows, group: Mapping[str, Any]) -> None:
        for state in self._kind.states:
            if state.name in rows.state and self._kind.set_by_first_step(state):
                for each in rows.state[state.name]:
                    each.fill_(group[state.initial])

    def keep_scalars(self, scalars: Mapping[str, Tensor]) -> None:
        """Store the new scalars after a step; every thread has computed the same values."""
        for name, values in scalars.items():
            for run, *_, rows in self._calls:
                values[run.first : run.last] = rows.scalars[name][0]

    def _gradients(
        self, span: ByteRange, gradients: RoleBuffers, weights: list[Tensor]
    ) -> list[Tensor]:
        flat = self._partition.view(gradients, weights[0].dtype, *span)
        return [flat] if len(weights) == 1 else [*torch.split(flat, weights[0].numel())]
