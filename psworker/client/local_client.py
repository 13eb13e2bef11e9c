"""Training without servers (PS_LOCAL=1): the optimizer runs in this process."""

import heapq
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from pscommon.core.data_stream import Spec, StreamSpec
from pscommon.core.log_entries import BatchKey
from pscommon.core.model_spec import ModelSpec, OptimizerSettings
from pscommon.core.partition import PartitionPlan
from pscommon.core.script_place import PassName, ScriptPlace
from pscommon.optim import KINDS
from pscommon.optim.specs import groups_from_json, validate_model
from pscommon.snapshot import tensors_in_buffer
from psworker.core.clock import Clock
from psworker.core.group_place import ALONE
from psworker.core.protocols import BegunPush
from psworker.core.results import (
    CollectiveCall,
    CollectiveResult,
    Lease,
    PushResult,
    Status,
    StepProgress,
)
from psworker.exchange.open_push import BufferedPush
from psworker.session.reports import ReportBuffer


class LocalClient:
    """A `JobClient` for one worker and no servers, with its `model` and its `data`.

    The torch optimizers that the model's spec names update the weights, one tensor at a time.
    Batches come in the order of their numbers. No call waits, and no push is stale.
    """

    job = "local"
    worker = 1
    policy = "local"
    bad_gradients = "abort"
    draining = stopping = False
    workers = 1
    is_first = True
    place = ALONE
    seed = 0

    def __init__(self, training: str = "0") -> None:
        self.training = training
        self.version = 0
        self.clock = Clock(time.monotonic, time.sleep)
        self._reports = ReportBuffer(self.clock.now)
        self.metrics: dict[str, float] = {}
        self._free: dict[int, FreeBatches] = {}
        self._laps: dict[int, StreamPasses] = {}

    @property
    def model(self) -> Self:
        return self

    @property
    def data(self) -> Self:
        return self

    def agree(self, spec: ModelSpec) -> PartitionPlan:
        spec = validate_model(spec)
        self._settings = spec.optimizers
        self.update_counts = dict.fromkeys(spec.optimizers, 0)
        self.plan = PartitionPlan(spec, shards=1)
        return self.plan

    def flat_buffers(self) -> tuple[memoryview, memoryview]:
        """Return new flat buffers for gradients and weights, plan.nbytes bytes each."""
        self._gradients, self._received = (
            torch.zeros(self.plan.nbytes, dtype=torch.uint8, device="cpu").numpy().data
            for _ in range(2)
        )
        return self._gradients, self._received

    def begin(self) -> BegunPush:
        return BufferedPush(
            partial(self.exchange, gradients=self._gradients, weights=self._received)
        )

    def start(self, weights: memoryview) -> None:
        """Take the worker's weights as the job's, and create the optimizers."""
        self._buffer = _bytes_of(weights).clone()
        self._weights = tensors_in_buffer(self.plan, self._buffer.numpy().data)
        members: list[list[Tensor]] = [[] for _ in self.plan.spec.groups]
        for spec, weight in zip(self.plan.spec.tensors, self._weights, strict=True):
            if spec.role == "trainable":
                members[spec.group].append(weight)
        self._groups_json = dict.fromkeys(self._settings, "")
        self._optimizers = {
            name: _make_optimizer(settings, members[groups.start : groups.stop])
            for (name, settings), groups in zip(
                self._settings.items(), self.plan.spec.group_ranges().values(), strict=True
            )
        }

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
        optimizer: str = "",
    ) -> PushResult:
        began, problem = time.perf_counter(), ""
        if gradients is not None:
            if samples:
                problem = self._step(gradients, absent, groups_json, optimizer)
            else:
                self._take_buffers(gradients)
        if weights is not None:
            moving = self.plan.section("buffer").stop  # frozen tensors never change
            _bytes_of(weights)[:moving].copy_(self._buffer[:moving])
        status: Status = "none" if gradients is None else "rejected" if problem else "applied"
        return PushResult(status, self.version, 0, problem, {"apply": time.perf_counter() - began})

    def each_rank(self, flag: bool) -> Sequence[bool]:
        return (flag,)

    def _step(
        self, gradients: memoryview, absent: Collection[int], groups_json: str, name: str
    ) -> str:
        """Make one step of an optimizer; return why it was rejected, or an empty text."""
        settings, optimizer = self._settings[name], self._optimizers[name]
        for index, pushed in enumerate(tensors_in_buffer(self.plan, gradients)):
            spec = self.plan.spec.tensors[index]
            if spec.role == "trainable":
                if index in absent:
                    self._weights[index].grad = None
                    continue
                # clipping must not change the worker's flat buffer
                self._weights[index].grad = pushed if settings.clip_norm is None else pushed.clone()
                if not pushed.isfinite().all():
                    return f"NON_FINITE: NaN or Inf in the gradient of {spec.name}"
        self._take_buffers(gradients)
        if groups_json and groups_json != self._groups_json[name]:
            self._groups_json[name] = groups_json
            groups = groups_from_json(groups_json, settings)
            for mine, new in zip(optimizer.param_groups, groups, strict=True):
                mine.update(new)
        if settings.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._weights, settings.clip_norm)
        optimizer.step()
        self.version += 1
        self.update_counts[name] += 1
        return ""

    def _take_buffers(self, pushed: memoryview) -> None:
        start, stop = self.plan.section("buffer")
        self._buffer[start:stop] = _bytes_of(pushed)[start:stop]

    def next_batches(
        self,
        loop: Spec,
        count: int = 1,
        idle: bool = False,
        first_open: ScriptPlace | int | None = None,
    ) -> Lease:
        if isinstance(loop, StreamSpec):
            numbers = self._laps.setdefault(loop.loop, StreamPasses(loop)).take()
        else:
            numbers = self._free.setdefault(loop.loop, FreeBatches(loop.total)).take(count)
        return Lease(numbers, end=not numbers, sat_out=False, share=self.share(loop))

    def share(self, loop: Spec) -> int:
        return 0 if isinstance(loop, StreamSpec) else loop.total

    def has_ended(self, loop: PassName) -> bool:
        """Return False: each run is a new job."""
        return False

    def return_batches(self, batches: Sequence[BatchKey], used: bool = False) -> None:
        for batch in () if used else batches:
            if batch.loop in self._laps:
                self._laps[batch.loop].put_back(batch)
            else:
                self._free[batch.loop].put_back(batch.number)

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

    def newest(self) -> tuple[PartitionPlan, memoryview, int]:
        """Return the partition, the weights' flat buffer, without a copy, and the version."""
        return self.plan, self._buffer.numpy().data, self.version

    def collective(
        self, number: int, call: CollectiveCall, first_open: ScriptPlace | int
    ) -> CollectiveResult:
        """Return this worker's values: there are no other workers."""
        return CollectiveResult(call.values, call.text, self.version)

    def status(self) -> Mapping[str, Any]:
        """Return an empty status."""
        return {}

    def show_progress(self, progress: StepProgress) -> None:
        """Do nothing: no server shows the progress."""

    def rejoin(self) -> None:
        """Do nothing: the membership cannot be lost."""

    def retire(self, reason: str = "") -> None:
        """Do nothing: no other worker waits."""

    def leave(self, reason: str = "") -> None:
        """Do nothing: no other worker waits."""

    def close(self) -> None:
        """Do nothing: no connection is open."""


class FreeBatches:
    """The free batches of a loop, smallest number first.

    Memory does not grow with the number of batches in the loop.
    """

    def __init__(self, total: int) -> None:
        self._total, self._next = total, 0
        self._returned: list[int] = []

    def take(self, count: int) -> tuple[int, ...]:
        """Return the numbers of up to `count` batches, and remove them."""
        numbers = [heapq.heappop(self._returned) for _ in range(min(count, len(self._returned)))]
        stop = min(self._total, self._next + count - len(numbers))
        numbers += range(self._next, stop)
        self._next = stop
        return tuple(numbers)

    def put_back(self, number: int) -> None:
        heapq.heappush(self._returned, number)


class StreamPasses:
    """Reads a stream's sources one after another.

    A lap is one pass over one source. An empty batch marks the end of a lap.
    """

    def __init__(self, spec: StreamSpec) -> None:
        self._spec = spec
        self._lap = self._place = 0

    def take(self) -> tuple[int, ...]:
        """Return the number of the next batch; empty after the last lap."""
        if self._lap == self._spec.laps:
            return ()
        self._place += 1
        return (self._spec.number(self._lap, self._place - 1),)

    def put_back(self, batch: BatchKey) -> None:
        """Take back the newest batch: the lap ended before it, or the script left the loop."""
        if batch.end and not batch.count:
            self._lap, self._place = self._lap + 1, 0
        else:
            self._place -= 1


def _make_optimizer(
    settings: OptimizerSettings, members: Sequence[Sequence[Tensor]]
) -> torch.optim.Optimizer:
    """Return the torch optimizer of these settings. members: The parameters of each group."""
    kind = KINDS[settings.name]
    groups = [
        {**group, "params": params} for params, group in zip(members, settings.groups, strict=True)
    ]
    make: Any = kind.torch_class
    optimizer: torch.optim.Optimizer = make(
        groups, **{key: settings.groups[0][key] for key in kind.constructor_only}
    )
    return optimizer


def _bytes_of(memory: memoryview) -> Tensor:
    return torch.from_numpy(np.asarray(memory))
