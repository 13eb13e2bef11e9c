"""torch.optim on long runs of the tape instead of on tensors.

The optimizers here treat each element by itself, so tensors that lie side by side, with the same
hyper-parameters, equally many steps behind them and equal scalars (NAdam's mu_product), can step
as one. In the common case that is one run per dtype and parameter group. A tensor that got no
gradient in a round is left out, as torch leaves out a parameter whose grad is None: its weight,
its state and its step count stay as they are.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pscommon.core.errors import SnapshotError
from pscommon.core.model_spec import OptimizerSettings
from pscommon.core.partition import ByteRange, TrainableRange, cut
from pscommon.optim import OptimizerKind, OptimizerState, Rows
from pscommon.optim.specs import SUPPORTED, Groups, Scalars
from pscommon.system.thread_team import ALONE, ThreadTeam
from psserver.parameters.partition import DTYPES, RoleBuffers, ShardPartition, blocks, padded, raw

PASSES_KEPT = 8
"""Sets of runs that stay prepared: a script that trains its parts in turn comes back to each."""


class StateReader(Protocol):
    """Where optimizer state is restored from, whatever number of shards wrote it."""

    def read(self, kind: str, start: int, stop: int, out: memoryview) -> bool:
        """Fills `out` with bytes [start, stop) of the tape of `kind`; False where not all of it
        was ever stored.
        """
        ...

    def kinds(self) -> set[str]: ...

    def steps(self) -> dict[int, int]: ...

    def scalars(self) -> Scalars: ...


class OptimizerRun(NamedTuple):
    """Tensors that step as one: places [first, last) among the shard's trainable slices, tape
    [start, stop).
    """

    first: int
    last: int
    start: int
    stop: int
    segment: int


class FlatOptimizer:
    """The optimizer of one shard's `weights`. Not thread-safe.

    spec: validated; its groups are the hyper-parameters until others are assigned to `groups`.
    State is created when it is first needed, for a whole parameter group at once, and so on all
    shards together.
    """

    def __init__(
        self,
        stretch: ShardPartition,
        weights: RoleBuffers,
        spec: OptimizerSettings,
        team: ThreadTeam = ALONE,
    ) -> None:
        self.groups: Groups = spec.groups
        self._kind = SUPPORTED[spec.name]
        self._team = team
        self._stretch = stretch
        self._weights = weights
        self._segments = stretch.segments["trainable"]
        self._slices = [
            (held, index)
            for index, segment in enumerate(self._segments)
            for held in stretch.slices(segment.start, segment.stop)
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
        """One step of all tensors but those in `absent`."""
        states = self._create_state()
        runs, passes = self._chosen(absent)
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
        """Every state tensor: torch's name of it, where on the tape it starts, and itself, flat."""
        for segment, state in zip(self._segments, self._state, strict=True):
            for name, tensor in state.items():
                yield name, segment.start, tensor

    def steps(self) -> dict[int, int]:
        """Steps of each tensor on this shard. A step that keeps no state (SGD without momentum)
        does not count.
        """
        return {
            held.tensor: count
            for (held, _), count in zip(self._slices, self._steps.tolist(), strict=True)
        }

    def scalars(self) -> Scalars:
        """Return the scalars of each tensor on this shard that has made a step; empty where the
        optimizer has none.
        """
        stepped = [
            (place, held.tensor)
            for place, (held, _) in enumerate(self._slices)
            if self._steps[place]
        ]
        return {
            name: {index: float(values[place]) for place, index in stepped}
            for name, values in self._scalars.items()
        }

    def restore(self, reader: StateReader) -> None:
        """Take over state and steps; set `groups` before. What was not stored starts afresh."""
        steps, stored = reader.steps(), reader.kinds()
        self._steps = torch.tensor(
            [steps.get(held.tensor, 0) for held, _ in self._slices], dtype=torch.int64
        )
        self._restore_scalars(reader.scalars() if self._scalars else {})
        self._passes, self._last = {}, None
        for segment, state in zip(self._segments, self._state, strict=True):
            state.clear()
            for kept in self._kind.states:
                if kept.name in stored:
                    tensor = self._initial(segment, kept)
                    if reader.read(kept.name, segment.start, segment.stop, raw(tensor)):
                        state[kept.name] = tensor

    def _restore_scalars(self, stored: Scalars) -> None:
        for name, values in self._scalars.items():
            for place, (held, _) in enumerate(self._slices):
                if self._steps[place]:
                    if held.tensor not in stored.get(name, {}):
                        raise SnapshotError(
                            f"the snapshot has no {name} of {self._stretch.name(held.tensor)}"
                        )
                    values[place] = stored[name][held.tensor]

    def _create_state(self) -> list[tuple[OptimizerState, ...]]:
        """Create the state that a step needs and that is not there. Return what each segment
        needs.
        """
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

    def _chosen(self, absent: frozenset[int]) -> "_Passes":
        """Tensors that stepped together stay together, so the runs change only with `absent`."""
        if self._last is None or self._last[0] != absent:
            runs = self._runs(absent)
            found = self._passes.get(runs)
            if found is None:
                if len(self._passes) == PASSES_KEPT:
                    self._passes.pop(next(iter(self._passes)))
                found = self._passes[runs] = runs, self._prepare(runs)
            self._last = absent, found
        return self._last[1]

    def _runs(self, absent: frozenset[int]) -> tuple[OptimizerRun, ...]:
        steps = self._steps if self._kind.by_step else self._steps.clamp(max=1)
        runs: list[OptimizerRun] = []
        before: tuple[Any, ...] | None = None
        columns = [values.where(self._steps > 0, 0.0).tolist() for values in self._scalars.values()]
        for place, ((held, segment), *like) in enumerate(
            zip(self._slices, steps.tolist(), *columns, strict=True)
        ):
            if held.tensor in absent:
                continue
            if before == (place, segment, *like):
                runs[-1] = runs[-1]._replace(last=place + 1, stop=padded(held.stop))
            else:
                runs.append(OptimizerRun(place, place + 1, held.start, padded(held.stop), segment))
            before = (place + 1, segment, *like)
        return tuple(runs)

    def _prepare(self, runs: tuple[OptimizerRun, ...]) -> "list[_ThreadPass]":
        """One for each part that the team's threads take, with a piece of every run."""
        parts = self._team.parts(sum(run.stop - run.start for run in runs))
        cuts = [cut(ByteRange(run.start, run.stop), parts) for run in runs]
        return [
            self._part(list(zip(runs, spans, strict=True))) for spans in zip(*cuts, strict=True)
        ]

    def _part(self, runs: list[tuple[OptimizerRun, ByteRange]]) -> "_ThreadPass":
        prepared = _ThreadPass(self._kind, self._stretch)
        for run, span in runs:
            if not span.nbytes:
                continue
            segment = self._segments[run.segment]
            dtype = DTYPES[segment.dtype]
            first, last = ((position - segment.start) // dtype.itemsize for position in span)
            state = {name: tensor[first:last] for name, tensor in self._state[run.segment].items()}
            prepared.add(
                run, span, segment.group, self._stretch.view(self._weights, dtype, *span), state
            )
        return prepared


_Passes = tuple[tuple[OptimizerRun, ...], "list[_ThreadPass]"]


class _FormulaCall(NamedTuple):
    """One call of the formula: a run, the span of it that is stepped, its parameter group, and
    the span's numbers.
    """

    run: OptimizerRun
    span: ByteRange
    group: int
    rows: Rows


class _ThreadPass:
    """What one thread of the team steps: a piece of every run."""

    def __init__(self, kind: OptimizerKind, stretch: ShardPartition) -> None:
        self._kind = kind
        self._stretch = stretch
        self._calls: list[_FormulaCall] = []

    def add(
        self,
        run: OptimizerRun,
        span: ByteRange,
        group: int,
        weights: Tensor,
        state: Mapping[str, Tensor],
    ) -> None:
        """The next run, of which this takes `span`: its parameter group, and the span's weights
        and state.
        """
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
        """One step; `steps` and `scalars` are those of each of the shard's slices before it."""
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
        """After the step: the new values into `scalars`. Every part of a run has computed the
        same.
        """
        for name, values in scalars.items():
            for run, *_, rows in self._calls:
                values[run.first : run.last] = rows.scalars[name][0]

    def _gradients(
        self, span: ByteRange, gradients: RoleBuffers, weights: list[Tensor]
    ) -> list[Tensor]:
        flat = self._stretch.view(gradients, weights[0].dtype, *span)
        return [flat] if len(weights) == 1 else [*torch.split(flat, weights[0].numel())]
