"""Steps under policy allreduce: the workers reduce the gradients and run the servers' formulas.

Theory of operation:

- This worker has the weights and the optimizer state of version `version`.
- A step asks for a reduce round. Before a round of gradients, other rounds may come: this worker
  gets the newest weights, sends them to another one, or uploads them.
- The gradients are added up, weighted by samples. Then a push without bytes goes to the servers.
- Once the push counts, every worker of the round makes the same step.
- A void round makes the step stale: its batches go back.
- The weights of `adapter.weights.host` change only here, so what the script does to its model
  between two steps is overwritten, as it is by the servers' weights.
"""

import json
import math
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from pscommon.core.errors import NonFiniteError
from pscommon.core.log_entries import WEIGHT, clip_factor
from pscommon.core.partition import PartitionPlan
from pscommon.optim.specs import (
    all_groups_from_json,
    groups_from_json,
    groups_to_json,
    validate_model,
)
from pscommon.parameters.means import blocks_of_mean, squares_of_mean, total
from pscommon.parameters.optimizer import FlatOptimizer
from pscommon.parameters.partition import ShardPartition
from pscommon.parameters.state_images import (
    StateImages,
    images_of,
    numbers_from_json,
    numbers_to_json,
)
from pscommon.system.thread_team import ThreadTeam, cores
from pscommon.telemetry.logs import get_logger
from psworker.core.results import PushResult, ReduceAnswer
from psworker.steps.process_groups import ProcessGroups, ReduceFailedError
from psworker.steps.step import PlainStep, Push, StepContext

log = get_logger(__name__)


class ReducedStep(PlainStep):
    """A step whose gradients the workers reduce. See the module."""

    is_double_buffered: ClassVar[bool] = True

    def __init__(self, context: StepContext) -> None:
        super().__init__(context)
        client: Any = context.client
        self._context, self._reduction = context, client.reduction
        self._groups = ProcessGroups(self._reduction.own_host)
        spec = validate_model(client.plan.spec)
        self._spec, self._settings = spec, spec.parts()[""].settings
        self._partition = ShardPartition(PartitionPlan(spec, 1), 0)
        self._nbytes = self._partition.plan.nbytes
        self._weights = self._partition.split_flat(self._adapter.weights.host)
        self._sums = self._partition.split_flat(self._adapter.gradients.host)
        team = ThreadTeam(min(4, cores()))
        self._optimizer = FlatOptimizer(self._partition, self._weights, self._settings, team)
        self._own_version: int | None = None
        self._lock = threading.Lock()
        client.model.offer_with(self._offer)

    # ---- rounds ----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Get the newest weights, and the optimizer state."""
        with self._lock:
            self._synchronize()
        self._adapter.scatter(everything=True)

    def _offer(self) -> None:
        """Send the weights to a worker that waits for them while this one waits elsewhere."""
        if self._own_version is not None and self._lock.acquire(blocking=False):
            try:
                self._synchronize()
            finally:
                self._lock.release()

    def _synchronize(self) -> None:
        while (found := self._ask(0)).kind != "none":
            self._carry_out(found)
        assert self._own_version is not None
        self._note_version(self._own_version)

    def _note_version(self, version: int) -> None:
        self._own_version = self.version = version
        self._reduction.set_version(version)

    def _ask(self, samples: int, groups_json: str = "", is_partial: bool = False) -> ReduceAnswer:
        answer: ReduceAnswer = self._reduction.ask(
            self._own_version, samples, self._groups.address, groups_json, is_partial
        )
        return answer

    def _carry_out(self, found: ReduceAnswer) -> None:
        """Do what a round without gradients is for."""
        if found.kind == "download":
            stored = self._reduction.download(self._adapter.weights.memory)
            images = {name: memoryview(image) for name, image in stored.states.items()}
            numbers = json.dumps({"steps": stored.steps, "scalars": stored.scalars})
            self._restore(stored.version, images, stored.groups_json, numbers)
        elif found.kind == "upload":
            self._upload()
        else:
            try:
                self._exchange_weights(found)
            except ReduceFailedError as error:
                self._groups.drop()
                log.debug("reduce_round_void", round=found.number, reason=str(error))

    def _restore(
        self, version: int, images: dict[str, memoryview], groups_json: str, numbers_json: str
    ) -> None:
        self._optimizer.groups = all_groups_from_json(groups_json, self._spec)[""]
        self._optimizer.restore(StateImages(images, numbers_from_json(numbers_json)))
        self._own_version = version

    def _is_open(self, found: ReduceAnswer) -> Callable[[], bool]:
        return lambda: bool(self._reduction.look_at(found.number)[0])

    def _exchange_weights(self, found: ReduceAnswer) -> None:
        """Send weights and state to the other workers of the round, or receive them."""
        is_source = found.source == self._reduction.worker
        self._groups.connect(found, self._reduction.worker)
        source, is_open = found.workers.index(found.source), self._is_open(found)
        images, text = {}, b""
        if is_source:
            images = images_of(self._optimizer, self._nbytes)
            text = json.dumps(
                [
                    self._own_version,
                    sorted(images),
                    groups_to_json(self._optimizer.groups),
                    numbers_to_json(self._optimizer),
                ]
            ).encode()
        size = torch.tensor([len(text)])
        self._groups.send(size, source, is_open)
        header = torch.zeros(int(size), dtype=torch.uint8)
        if is_source:
            header.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        self._groups.send(header, source, is_open)
        version, names, groups_json, numbers = json.loads(bytes(header.tolist()))
        if not is_source:
            self._own_version = None  # until all has arrived
        self._groups.send(self._adapter.weights.host, source, is_open)
        for name in names:
            image = images.setdefault(name, memoryview(bytearray(self._nbytes)))
            self._groups.send(torch.frombuffer(image, dtype=torch.uint8), source, is_open)
        if not is_source:
            self._restore(version, images, groups_json, numbers)

    def _upload(self) -> None:
        """Send weights and state to the servers."""
        assert self._own_version is not None
        for name, image in images_of(self._optimizer, self._nbytes).items():
            if not self._reduction.upload(name, image, self._own_version, "", ""):
                return
        self._reduction.upload(
            WEIGHT,
            self._adapter.weights.memory,
            self._own_version,
            groups_to_json(self._optimizer.groups),
            numbers_to_json(self._optimizer),
        )

    # ---- steps -----------------------------------------------------------------------------------

    def push(self, push: Push) -> PushResult:
        """Reduce the gradients; make the step if the push without bytes counts."""
        with self._lock:
            is_partial = bool(self._adapter.absent(self._adapter.grads()))
            while True:
                base = self._own_version if self._own_version is not None else 0
                found = self._ask(push.samples, push.groups_json, is_partial)
                if found.kind == "gradients":
                    break
                self._carry_out(found)
            try:
                self._groups.connect(found, self._reduction.worker)
                untouched = self._sum(found)
            except ReduceFailedError as error:
                self._groups.drop()
                log.debug("reduce_round_void", round=found.number, reason=str(error))
                return PushResult("stale", base, reason=f"STALE: {error}")
            result: PushResult = self._reduction.push(
                found.number, push.samples, base, push.batches, ""
            )
            if result.status in ("applied", "duplicate"):
                self._step(found, untouched)
                self._note_version(base + 1)
            self._adapter.scatter()
            return result

    def _sum(self, found: ReduceAnswer) -> frozenset[int]:
        """Replace gradients and buffers by their means over the round.

        Returns:
            The tensors without a gradient on any worker.
        """
        partition, sums = self._partition, self._sums
        place = found.workers.index(self._reduction.worker)
        share = found.samples[place] / sum(found.samples)
        absent = self._adapter.gather("")
        self._check_finite(absent)
        tensors: list[Tensor] = []
        narrow: list[tuple[Tensor, Tensor]] = []
        for piece in partition.pieces((frozenset(),)):
            for span in partition.slices(*piece.span) if absent else ():
                if span.tensor in absent:
                    partition.view(sums, piece.dtype, span.start, span.stop).zero_()
            view = partition.view(sums, piece.dtype, *piece.span)
            view.index_fill_(0, partition.padding(piece), 0.0)
            wide = view if piece.dtype in (torch.float32, torch.float64) else view.float()
            if wide is not view:
                narrow.append((view, wide))
            tensors.append(wide.mul_(share))
        buffers = self._buffer_values(place, share)
        trainable = sorted(partition.trainable)
        present = torch.tensor([float(index not in absent) for index in trainable])
        extra = [buffers] if buffers is not None else []
        self._groups.sum(
            [*tensors, *extra, *([present] if found.is_partial else [])], self._is_open(found)
        )
        for view, wide in narrow:
            view.copy_(wide)
        self._mean_buffers = buffers
        if not found.is_partial:
            return frozenset()
        return frozenset(
            index for index, count in zip(trainable, present.tolist(), strict=True) if not count
        )

    def _check_finite(self, absent: frozenset[int]) -> None:
        for piece in self._partition.pieces((absent,)):
            flat = self._partition.view(self._sums, piece.dtype, *piece.span)
            if math.isfinite(flat.sum().item()):  # one pass, and no memory
                continue
            for span in self._partition.slices(*piece.span):
                view = self._partition.view(self._sums, piece.dtype, span.start, span.stop)
                if span.tensor not in absent and not bool(torch.isfinite(view).all()):
                    name = self._partition.name(span.tensor)
                    raise NonFiniteError(f"the gradient of {name} has NaN or Inf", "NON_FINITE")

    def _buffer_values(self, place: int, share: float) -> Tensor | None:
        """Return this worker's part of the buffers: a share, or all of the first worker's."""
        parts = []
        for segment in self._partition.segments["buffer"]:
            view = self._partition.view_segment(self._sums, segment).double()
            if segment.is_first:
                parts.append(view if place == 0 else torch.zeros_like(view))
            else:
                parts.append(view * share)
        return torch.cat(parts) if parts else None

    def _step(self, found: ReduceAnswer, untouched: frozenset[int]) -> None:
        """Make the step that the servers would make."""
        if self._settings.clip_norm is not None:
            self._clip(self._settings.clip_norm)
        if found.groups_json:
            self._optimizer.groups = groups_from_json(found.groups_json, self._settings)
        self._optimizer.step(self._sums, untouched)
        values, start = self._mean_buffers, 0
        for segment in self._partition.segments["buffer"]:
            target = self._partition.view_segment(self._weights, segment)
            assert values is not None
            part = values[start : start + len(target)]
            target.copy_(part if target.dtype.is_floating_point else part.round())
            start += len(target)

    def _clip(self, clip_norm: float) -> None:
        squares: list[float] = []
        views = []
        for piece in self._partition.pieces((frozenset(),)):
            view = self._partition.view(self._sums, piece.dtype, *piece.span)
            views.append(view)
            padding = self._partition.padding(piece)
            for block in blocks_of_mean([view], [1.0], padding):
                squares += squares_of_mean(block)
        factor = clip_factor(clip_norm, total(squares))
        if factor < 1.0:
            for view in views:
                view.mul_(factor)

    # ---- the rest of a strategy ------------------------------------------------------------------

    def pull(self) -> None:
        """Load the newest weights into the model: those of this worker, or of another one."""
        self._adapter.reattach()
        with self._lock:
            self._synchronize()
        self._adapter.scatter()

    def store_buffers(self) -> None:
        """Upload the weights, if this worker is the first or ends, and the servers lack them."""
        self.skip()
        if self._own_version is None or not (
            self._context.is_closing() or self._context.client.is_first
        ):
            return
        self.publish()

    def publish(self) -> None:
        """Upload the weights, unless the servers have these or newer ones."""
        with self._lock:
            version = self._own_version
            if version is not None and self._reduction.look_at(1)[1] < version:
                self._upload()

    def renew(self) -> None:
        """Get the job's weights: the worker has a new membership."""
        self._own_version = None
        self._adapter.reattach()
        self.begin()
