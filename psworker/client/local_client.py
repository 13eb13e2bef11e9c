"""Training without servers (PS_LOCAL=1): the same steps in the same order, with the optimizer in
this process.
"""

import heapq
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pscommon.core.data_stream import Spec, StreamSpec
from pscommon.core.log_entries import BatchKey
from pscommon.core.model_spec import ModelSpec
from pscommon.core.partition import PartitionPlan
from pscommon.optim.specs import SUPPORTED, groups_from_json, groups_to_json, validate
from psworker.core.protocols import PushStream
from psworker.core.results import Lease, PushResult, Status
from psworker.exchange.buffered_push import BufferedPush
from psworker.session.reports import ReportBuffer

log = logging.getLogger("psworker")


class LocalClient:
    """A job of one worker and no servers, with the interface of `psworker.Client` that a Job
    uses.

    Weights are stepped by the torch optimizer that the model's spec names, one tensor at a time,
    as a plain script would; batches are dealt in the order of their numbers. Nothing waits,
    nothing is stale.
    """

    job = "local"
    worker = 1
    policy = "local"
    bad_gradients = "abort"
    open_loop = 0
    draining = stopping = False
    workers = 1
    is_first = True

    def __init__(self) -> None:
        self.version = 0
        self._reports = ReportBuffer(time.monotonic)
        self.groups_json = ""
        self.metrics: dict[str, float] = {}
        self._free: dict[int, FreeBatches] = {}
        self._laps: dict[int, StreamPasses] = {}

    def agree(self, spec: ModelSpec) -> PartitionPlan:
        self._optimizer_spec = validate(spec.optimizer)
        self.groups_json = groups_to_json(self._optimizer_spec.groups)
        self.plan = PartitionPlan(spec, shards=1)
        return self.plan

    def tapes(self) -> tuple[memoryview, memoryview]:
        """Memory for gradients and weights, of plan.nbytes bytes each."""
        self._gradients, self._received = (
            torch.zeros(self.plan.nbytes, dtype=torch.uint8, device="cpu").numpy().data
            for _ in range(2)
        )
        return self._gradients, self._received

    def begin(self) -> PushStream:
        return BufferedPush(self.exchange, self._gradients, self._received)

    def start(self, tape: memoryview) -> None:
        """The worker's weights are the job's."""
        self._tape = _bytes_of(tape).clone()
        self._weights = [
            _view(self._tape, self.plan, index) for index in range(len(self.plan.spec.tensors))
        ]
        members: list[list[Tensor]] = [[] for _ in self._optimizer_spec.groups]
        for spec, weight in zip(self.plan.spec.tensors, self._weights, strict=True):
            if spec.role == "trainable":
                members[spec.group].append(weight)
        groups = self._optimizer_spec.groups
        kind = SUPPORTED[self._optimizer_spec.name]
        parameters = [
            {**group, "params": params} for params, group in zip(members, groups, strict=True)
        ]
        make: Any = kind.torch_class
        self._optimizer = make(parameters, **{key: groups[0][key] for key in kind.constructor_only})

    def exchange(
        self,
        *,
        gradients: memoryview | None,
        weights: memoryview | None,
        absent: Collection[int] = (),
        samples: int = 1,
        batches: Sequence[BatchKey] = (),
        groups_json: str = "",
        base: int | None = None,
    ) -> PushResult:
        began, problem = time.perf_counter(), ""
        if gradients is not None:
            problem = self._step(_bytes_of(gradients), absent, groups_json)
        if weights is not None:
            moving = self.plan.section("buffer").stop  # frozen tensors are the worker's own
            _bytes_of(weights)[:moving].copy_(self._tape[:moving])
        status: Status = "none" if gradients is None else "rejected" if problem else "applied"
        return PushResult(status, self.version, 0, problem, {"apply": time.perf_counter() - began})

    def _step(self, tape: Tensor, absent: Collection[int], groups_json: str) -> str:
        """One optimizer step, or why there cannot be one."""
        for index, spec in enumerate(self.plan.spec.tensors):
            pushed = _view(tape, self.plan, index)
            if spec.role == "trainable":
                self._weights[index].grad = None if index in absent else self._own(pushed)
                if index not in absent and not pushed.isfinite().all():
                    return f"NON_FINITE: NaN or Inf in the gradient of {spec.name}"
        self._take_buffers(tape)
        self._take_groups(groups_json)
        if (clip_norm := self._optimizer_spec.clip_norm) is not None:
            torch.nn.utils.clip_grad_norm_(self._weights, clip_norm)
        self._optimizer.step()
        self.version += 1
        return ""

    def _own(self, pushed: Tensor) -> Tensor:
        """What may be clipped: the worker's tape stays as it is."""
        return pushed if self._optimizer_spec.clip_norm is None else pushed.clone()

    def _take_buffers(self, tape: Tensor) -> None:
        start, stop = self.plan.section("buffer")
        self._tape[start:stop] = tape[start:stop]

    def _take_groups(self, groups_json: str) -> None:
        if groups_json:
            groups: Sequence[Mapping[str, Any]] = groups_from_json(
                groups_json, self._optimizer_spec
            )
            for mine, new in zip(self._optimizer.param_groups, groups, strict=True):
                mine.update(new)

    def next_batches(
        self, loop: Spec, count: int = 1, idle: bool = False, first_open: int | None = None
    ) -> Lease:
        if isinstance(loop, StreamSpec):
            numbers = self._laps.setdefault(loop.loop, StreamPasses(loop)).take()
        else:
            numbers = self._free.setdefault(loop.loop, FreeBatches(loop.total)).take(count)
        return Lease(numbers, end=not numbers, sat_out=False, share=self.share(loop))

    def share(self, loop: Spec) -> int:
        return 0 if isinstance(loop, StreamSpec) else loop.total

    def has_ended(self, loop: int) -> bool:
        """Each run is a job of its own."""
        return False

    def return_batches(self, batches: Sequence[BatchKey]) -> None:
        for batch in batches:
            if batch.loop in self._laps:
                self._laps[batch.loop].put_back(batch)
            else:
                self._free[batch.loop].put_back(batch.number)

    def drop_batches(self, batches: Sequence[BatchKey]) -> None:
        """What was dealt is not dealt again."""

    def report_soon(self, values: Mapping[str, Any]) -> None:
        self._reports.add(values, self.version)
        self._take_reports()

    def send_reports(self) -> None:
        self._reports.settle(final=True)
        self._take_reports()

    def _take_reports(self) -> None:
        reports = self._reports.unsent()
        self.metrics.update({report.name: report.value for report in reports})
        self._reports.confirm(reports)

    def newest(self) -> tuple[PartitionPlan, memoryview]:
        """The weights, and where what lies."""
        return self.plan, self._tape.numpy().data

    def status(self) -> Mapping[str, Any]:
        """Without servers nothing is resumed, and there is nothing to tell."""
        return {}

    def progress(
        self, *, steps: int, step_seconds: float, samples_per_second: float, phase: str
    ) -> None:
        """Nobody watches."""

    def rejoin(self) -> None:
        """Nobody goes on without it."""

    def retire(self, reason: str = "") -> None:
        """Nobody waits."""

    def leave(self, reason: str = "") -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Nothing is open."""


class FreeBatches:
    """The batches of a loop that are to be dealt, smallest number first. Its size does not
    depend on their number.
    """

    def __init__(self, total: int) -> None:
        self._total, self._next = total, 0
        self._returned: list[int] = []

    def take(self, count: int) -> tuple[int, ...]:
        """Up to `count` batches."""
        numbers = [heapq.heappop(self._returned) for _ in range(min(count, len(self._returned)))]
        stop = min(self._total, self._next + count - len(numbers))
        numbers += range(self._next, stop)
        self._next = stop
        return tuple(numbers)

    def put_back(self, number: int) -> None:
        heapq.heappush(self._returned, number)


class StreamPasses:
    """A stream's sources, read one after another. A lap's end is found by an empty batch behind
    it.
    """

    def __init__(self, spec: StreamSpec) -> None:
        self._spec = spec
        self._lap = self._place = 0

    def take(self) -> tuple[int, ...]:
        """The next batch, if there may be one."""
        if self._lap == self._spec.laps:
            return ()
        self._place += 1
        return (self._spec.number(self._lap, self._place - 1),)

    def put_back(self, batch: BatchKey) -> None:
        """The newest one was not used: the lap ends before it, or its loop was left."""
        if batch.end and not batch.count:
            self._lap, self._place = self._lap + 1, 0
        else:
            self._place -= 1


def _bytes_of(memory: memoryview) -> Tensor:
    return torch.from_numpy(np.asarray(memory))


def _view(tape: Tensor, plan: PartitionPlan, index: int) -> Tensor:
    spec, extent = plan.spec.tensors[index], plan.extent(index)
    return tape[extent.start : extent.stop].view(getattr(torch, spec.dtype)).view(spec.shape)
