"""torch.optim on long runs of the tape instead of on tensors.

The optimizers here treat each element by itself, so tensors that lie side by side, with the same hyper-parameters and
equally many steps behind them, can step as one. In the common case that is one run per dtype and parameter group. A
tensor that got no gradient in a round is left out, as torch leaves out a parameter whose grad is None: its weight, its
state and its step count stay as they are.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pscommon.core.model import OptimizerSpec
from pscommon.core.tape import Range, Segment, cut
from pscommon.optimizers import SUPPORTED, Groups, Kind, State
from pscommon.team import ALONE, Team
from psserver.stretch import DTYPES, Memory, Stretch, blocks, padded, raw

PASSES_KEPT = 8
"""Sets of runs that stay prepared: a script that trains its parts in turn comes back to each."""


class StateReader(Protocol):
    """Where optimizer state is restored from, whatever number of shards wrote it."""

    def read(self, kind: str, start: int, stop: int, out: memoryview) -> bool:
        """Fills `out` with bytes [start, stop) of the tape of `kind`; False where not all of it was ever stored."""
        ...

    def kinds(self) -> set[str]: ...

    def steps(self) -> dict[int, int]: ...


class Run(NamedTuple):
    """Tensors that step as one: places [first, last) among the shard's trainable slices, tape [start, stop)."""

    first: int
    last: int
    start: int
    stop: int
    segment: int


class FlatOptimizer:
    """The optimizer of one shard's `weights`. Not thread-safe.

    spec: validated; its groups are the hyper-parameters until others are assigned to `groups`.
    State is created when it is first needed, for a whole parameter group at once, and so on all shards together.
    """

    def __init__(self, stretch: Stretch, weights: Memory, spec: OptimizerSpec, team: Team = ALONE) -> None:
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
        self._state: list[dict[str, Tensor]] = [{} for _ in self._segments]
        self._passes: dict[tuple[Run, ...], _Passes] = {}
        self._last: tuple[frozenset[int], _Passes] | None = None

    def step(self, gradients: Memory, absent: frozenset[int]) -> None:
        """One step of all tensors but those in `absent`."""
        self._create_state()
        runs, passes = self._chosen(absent)
        self._team.map(lambda each: each.step(gradients, self.groups, self._steps), passes)
        for run in runs:
            if self._state_of(run.segment):
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
        """Steps of each tensor on this shard. A step that keeps no state (SGD without momentum) does not count."""
        return {held.tensor: count for (held, _), count in zip(self._slices, self._steps.tolist(), strict=True)}

    def restore(self, reader: StateReader) -> None:
        """Take over state and steps; set `groups` before. What was not stored starts afresh."""
        steps, stored = reader.steps(), reader.kinds()
        self._steps = torch.tensor([steps.get(held.tensor, 0) for held, _ in self._slices], dtype=torch.int64)
        self._passes, self._last = {}, None
        for segment, state in zip(self._segments, self._state, strict=True):
            state.clear()
            for kept in self._kind.states:
                if kept.name in stored:
                    tensor = self._initial(segment, kept)
                    if reader.read(kept.name, segment.start, segment.stop, raw(tensor)):
                        state[kept.name] = tensor

    def _state_of(self, segment: int) -> tuple[State, ...]:
        return self._kind.states_of(self.groups[self._segments[segment].group])

    def _create_state(self) -> None:
        for index, (segment, state) in enumerate(zip(self._segments, self._state, strict=True)):
            for needed in self._state_of(index):
                if needed.name not in state:
                    state[needed.name] = self._initial(segment, needed)
                    self._passes, self._last = {}, None

    def _initial(self, segment: Segment, state: State) -> Tensor:
        dtype = DTYPES[segment.dtype]
        size = (segment.stop - segment.start) // dtype.itemsize
        value: Any = self.groups[segment.group][state.initial] if state.initial else 0.0
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

    def _runs(self, absent: frozenset[int]) -> tuple[Run, ...]:
        steps = self._steps if self._kind.by_step else self._steps.clamp(max=1)
        runs: list[Run] = []
        before: tuple[int, int, int] | None = None
        for place, ((held, segment), count) in enumerate(zip(self._slices, steps.tolist(), strict=True)):
            if held.tensor in absent:
                continue
            if before == (place, segment, count):
                runs[-1] = runs[-1]._replace(last=place + 1, stop=padded(held.stop))
            else:
                runs.append(Run(place, place + 1, held.start, padded(held.stop), segment))
            before = (place + 1, segment, count)
        return tuple(runs)

    def _prepare(self, runs: tuple[Run, ...]) -> "list[_Pass]":
        """One for each part that the team's threads take, with a piece of every run."""
        parts = self._team.parts(sum(run.stop - run.start for run in runs))
        cuts = [cut(Range(run.start, run.stop), parts) for run in runs]
        return [self._part(list(zip(runs, spans, strict=True))) for spans in zip(*cuts, strict=True)]

    def _part(self, runs: list[tuple[Run, Range]]) -> "_Pass":
        prepared = _Pass(self._kind, self._stretch)
        for run, span in runs:
            if not span.nbytes:
                continue
            segment = self._segments[run.segment]
            dtype = DTYPES[segment.dtype]
            first, last = ((position - segment.start) // dtype.itemsize for position in span)
            state = {name: tensor[first:last] for name, tensor in self._state[run.segment].items()}
            prepared.add(run, span, segment.group, self._stretch.view(self._weights, dtype, *span), state)
        return prepared


_Passes = tuple[tuple[Run, ...], "list[_Pass]"]


class _Pass:
    """A torch optimizer whose parameters are runs of the tape, and whose state are views of the flat one."""

    def __init__(self, kind: Kind, stretch: Stretch) -> None:
        self._kind = kind
        self._stretch = stretch
        self._runs: list[tuple[Run, Range, int]] = []
        # torch wants a parameter to start with, and Adagrad would allocate state for it; without a gradient it is idle
        self._optimizer: torch.optim.Optimizer = kind.torch_class([torch.empty(0)])
        # torch's own step without what it is wrapped in for profiler and compiler, which costs more than a small step
        self._torch_step: Callable[[torch.optim.Optimizer], object] = inspect.unwrap(type(self._optimizer).step)

    def add(self, run: Run, span: Range, group: int, weights: Tensor, state: Mapping[str, Tensor]) -> None:
        """The next run, of which this takes `span`: its parameter group, and the span's weights and state."""
        columns = (weights, *state.values())
        fused = weights.dtype in self._kind.fused
        rows = [columns] if fused else list(blocks(*columns))
        self._runs.append((run, span, group))
        self._optimizer.add_param_group({"params": [row[0] for row in rows], "fused": fused, "foreach": False})
        for parameter, *kept in rows:
            step = torch.zeros((), dtype=torch.float32)
            self._optimizer.state[parameter] = {"step": step, **dict(zip(state, kept, strict=True))}

    def step(self, gradients: Memory, groups: Groups, steps: Tensor) -> None:
        """One step; `steps` has the count of each of the shard's slices before it."""
        for (run, span, number), group in zip(self._runs, self._optimizer.param_groups[1:], strict=True):
            count = int(steps[run.first])
            group.update(groups[number])
            group.update(self._kind.first if count == 0 else {})
            self._bind(span, group["params"], gradients, count)
        with torch.no_grad():
            self._torch_step(self._optimizer)
        for group in self._optimizer.param_groups[1:]:
            for parameter in group["params"]:
                parameter.grad = None

    def _bind(self, span: Range, parameters: list[Tensor], gradients: Memory, count: int) -> None:
        flat = self._stretch.view(gradients, parameters[0].dtype, *span)
        parts = (flat,) if len(parameters) == 1 else torch.split(flat, parameters[0].numel())
        for parameter, gradient in zip(parameters, parts, strict=True):
            parameter.grad = gradient
            if self._kind.by_step:
                self._optimizer.state[parameter]["step"].fill_(count)
