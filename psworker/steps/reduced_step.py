"""Steps under policy allreduce: the workers reduce the gradients and run the servers' formulas.

Theory of operation:

- This worker has weights, of `_own_version`, in the client's buffer (`adapter.weights.host`), and
  their optimizer state. Both change by steps, and by rounds of weights: also while the script waits
  or computes, if another worker needs weights.
- The model has weights of `version`: it takes those of this worker in a step and in a pull. So what
  the script does to its model between two steps is overwritten, as it is by servers' weights.
- A step asks for a reduce round. A gradient counts only if it is of the newest weights: if others
  arrive first, the step is stale.
- The gradients are added up, weighted by samples. Then a push without bytes goes to the servers.
- Once the push counts, every worker of the round makes the same step.
- A void round makes the step stale: its batches go back.
"""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, compress
from typing import ClassVar, cast

import torch
from torch import Tensor

from pscommon.core.errors import FencedError, NonFiniteError, PSError
from pscommon.core.partition import PartitionPlan
from pscommon.optim.specs import (
    all_groups_from_json,
    groups_from_json,
    groups_to_json,
    validate_model,
)
from pscommon.parameters.finite_values import find_in_buffers
from pscommon.parameters.means import mean_of_values, share_of_samples
from pscommon.parameters.optimizer import FlatOptimizer
from pscommon.parameters.partition import RoleBuffers, ShardPartition, raw
from pscommon.parameters.state_images import (
    StateImages,
    images_of,
    numbers_from_json,
    numbers_to_json,
)
from pscommon.system.thread_team import ThreadTeam
from pscommon.telemetry.logs import get_logger
from psworker.core.protocols import ReducingClient
from psworker.core.results import PushResult, ReduceAnswer
from psworker.model.adapter import ModelAdapter, refuse_sparse
from psworker.model.flat_buffer import tensor_of
from psworker.steps.gradient_sums import GradientSums
from psworker.steps.process_groups import ProcessGroups, ReduceFailedError
from psworker.steps.step import PlainStep, Push, StepContext

MAX_OPTIMIZER_THREADS_COUNT = 4

log = get_logger(__name__)


class ReducedStep(PlainStep):
    """A step whose gradients the workers reduce. See the module."""

    is_double_buffered: ClassVar[bool] = True
    _adapter: ModelAdapter
    _client: ReducingClient

    def __init__(self, context: StepContext) -> None:
        super().__init__(context)
        # Job.optimizer uses this strategy with no other client
        self._client = client = cast(ReducingClient, context.client)
        self._rejoin = context.rejoin
        self._reduction = client.reduction
        self._spec = validate_model(client.plan.spec)
        self._settings = self._spec.parts()[""].settings
        self._partition = ShardPartition(PartitionPlan(self._spec, 1), 0)
        self._groups = ProcessGroups(self._reduction.own_host, self._partition.step_nbytes)
        self._weights = self._partition.split_flat(self._adapter.weights.host)
        self._own = self._partition.split_flat(self._adapter.gradients.host)
        group = self._adapter.trainable
        self._own_gradients = [  # of a GPU
            self._partition.view(self._own, tensor.dtype, *extent).view(tensor.shape)
            for tensor, extent in zip(group.tensors, group.extents, strict=True)
        ]
        team = ThreadTeam(min(MAX_OPTIMIZER_THREADS_COUNT, torch.get_num_threads()))
        self._optimizer = FlatOptimizer(self._partition, self._weights, self._settings, team)
        self._state_nbytes = self._partition.plan.section("trainable").stop
        self._sums = self._new_sums()
        self._collected: Sequence[Tensor] = ()  # buffers of each worker of the newest round
        self._own_version: int | None = None
        self._generation = 0  # the start of the servers that `_own_version` belongs to
        self._completed = 0  # number of the newest round of weights without a failure
        self._is_member = True
        self._lock = threading.Lock()
        client.model.offer_with(self._offer)

    def _new_sums(self) -> GradientSums:
        return GradientSums(self._partition, self._adapter, self._groups.memory)

    # ---- weights ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """Get the newest weights, and the optimizer state."""
        if self._generation != (now := self._reduction.generation()):
            self._own_version, self._generation = None, now  # after a rollback versions are others
        with self._lock:
            self._synchronize()
            self._load(everything=True)

    def renew(self) -> None:
        """Get the job's weights: the worker has a new membership."""
        self._adapter.reattach()
        self._is_member = True
        self.begin()

    def drop(self, error: PSError) -> None:
        self._is_member = False

    def pull(self) -> None:
        """Load the newest weights into the model: those of this worker, or of another one."""
        self._adapter.reattach()
        with self._lock:
            self._synchronize()
            self._load()

    def newest(self) -> tuple[PartitionPlan, memoryview, int]:
        """Return the newest weights, of this worker or of another one, as JobClient.newest."""
        while self._is_member:
            try:
                with self._lock:
                    version = self._synchronize()
                    weights = memoryview(bytearray(self._adapter.weights.memory))
                    return self._partition.plan, weights, version
            except FencedError as error:
                self._rejoin(error)
        found = super().newest()
        is_current = self._generation == self._reduction.generation()
        if self._own_version is None or not is_current or self._own_version < found[2]:
            return found
        # this worker has left the rounds, perhaps without an upload
        weights = memoryview(bytearray(self._adapter.weights.memory))
        return self._partition.plan, weights, self._own_version

    def _load(self, everything: bool = False) -> None:
        """Load the weights of this worker into the model."""
        assert self._own_version is not None
        self._adapter.scatter(everything)
        self.version = self._own_version
        self._reduction.set_version(self._own_version)

    def _offer(self) -> None:
        """Send the weights to a worker that waits for them while this one waits elsewhere."""
        if self._own_version is not None and self._lock.acquire(blocking=False):
            try:
                self._synchronize()
            finally:
                self._lock.release()

    def _synchronize(self) -> int:
        """Get the newest weights, unless this worker has them; return their version."""
        while (found := self._ask(0)).kind != "none":
            self._carry_out(found)
        assert self._own_version is not None
        return self._own_version

    def _ask(self, samples: int, groups_json: str = "", is_partial: bool = False) -> ReduceAnswer:
        return self._reduction.ask(
            self._own_version,
            samples,
            self._groups.address,
            groups_json,
            is_partial,
            self._completed,
        )

    def _carry_out(self, found: ReduceAnswer) -> None:
        """Do what a round without gradients is for."""
        if found.kind == "download":
            self._download()
        elif found.kind == "upload":
            self._upload()
        else:
            try:
                self._exchange_weights(found)
                self._completed = found.number
            except ReduceFailedError as error:
                log.warning("reduce_round_void", round=found.number, reason=str(error))

    def _download(self) -> None:
        memory = torch.zeros_like(self._adapter.weights.host)  # also between the tensors
        stored = self._reduction.download(raw(memory))
        images = {name: memoryview(image) for name, image in stored.states.items()}
        numbers = json.dumps({"steps": stored.steps, "scalars": stored.scalars})
        self._take_state(stored.version, memory, images, stored.groups_json, numbers)

    def _take_state(
        self,
        version: int,
        weights: Tensor,
        images: Mapping[str, memoryview],
        groups_json: str,
        numbers_json: str,
    ) -> None:
        """Take complete weights and optimizer state of a version."""
        self._adapter.weights.host.copy_(weights)
        self._optimizer.groups = all_groups_from_json(groups_json, self._spec)[""]
        self._optimizer.restore(StateImages(images, numbers_from_json(numbers_json)))
        self._own_version = version

    def _exchange_weights(self, found: ReduceAnswer) -> None:
        """Send weights and state to the other workers of the round, or receive them.

        Copies travel: after a failure an operation may still read or write them.
        """
        self._groups.connect(found, self._reduction.worker)
        is_source = found.source == self._reduction.worker
        source, is_open = found.workers.index(found.source), self._is_open(found)
        images, text = dict[str, memoryview](), b""
        if is_source:
            images = images_of(self._optimizer, self._state_nbytes)
            numbers = numbers_to_json(self._optimizer)
            groups_json = groups_to_json(self._optimizer.groups)
            text = json.dumps([self._own_version, sorted(images), groups_json, numbers]).encode()
        size = torch.tensor([len(text)])
        self._groups.send(size, source, is_open)
        header = tensor_of(memoryview(bytearray(text.ljust(int(size)))))
        self._groups.send(header, source, is_open)
        version, names, groups_json, numbers = json.loads(bytes(raw(header)))
        weights = self._adapter.weights.host.clone()
        self._groups.send(weights, source, is_open)
        for name in names:
            image = images.setdefault(name, memoryview(bytearray(self._state_nbytes)))
            self._groups.send(tensor_of(image), source, is_open)
        if not is_source:
            self._take_state(version, weights, images, groups_json, numbers)

    def _is_open(self, found: ReduceAnswer) -> Callable[[], bool]:
        return lambda: self._reduction.is_open(found.number)

    def _upload(self) -> None:
        """Send weights and optimizer state to the servers; they take both or, if older, none."""
        with self._reduction.finishing():
            result = self._client.model.exchange(
                gradients=self._adapter.weights.memory,
                weights=None,
                samples=0,
                groups_json=groups_to_json(self._optimizer.groups),
                base=self._own_version,
                states=images_of(self._optimizer, self._state_nbytes),
                state_json=numbers_to_json(self._optimizer),
            )
        if result.status not in ("applied", "duplicate"):
            log.info("upload_refused", version=self._own_version, reason=result.reason)

    def store_buffers(self, takes_changes: bool) -> None:
        """Upload what the servers lack, if this worker is the first, or makes no further step.

        These are the weights, and buffers that the script has changed since its last step.
        """
        self.skip()
        if self._own_version is None or not (self._is_closing() or self._client.is_first):
            return
        is_current = self._own_version == self.version
        is_own = takes_changes and is_current and not self._adapter.keeps_changes()
        if is_own:
            self._adapter.reattach()
        with self._lock, self._last_changes():
            is_changed = is_own and self._take_own_buffers()
            if is_changed or self._reduction.uploaded_version() < self._own_version:
                self._upload()

    def _take_own_buffers(self) -> bool:
        """Take the model's buffers without an average; return whether the script changed them."""
        self._adapter.write_buffers()
        self._adapter.gradients.to_host([self._adapter.buffer_range]).synchronize()
        self._check_buffers()
        view = self._partition.view_segment
        changed = [
            (stored, own)
            for segment in self._partition.segments["buffer"]
            if segment.is_first
            for stored, own in [(view(self._weights, segment), view(self._own, segment))]
            if not torch.equal(stored, own)
        ]
        for stored, own in changed:
            stored.copy_(own)
        return bool(changed)

    def _check_buffers(self) -> None:
        if name := find_in_buffers(self._partition, self._own, self._weights):
            raise NonFiniteError(f"tensor {name} has NaN or Inf", "NON_FINITE")

    # ---- steps -----------------------------------------------------------------------------------

    def push(self, push: Push) -> PushResult:
        """Reduce the gradients; make the step if the push without bytes counts."""
        with self._lock:
            found = self._find_round(push)
            if found is None:
                self._adapter.reattach()
                self._synchronize()
                self._load()
                return self._stale("the job has newer weights than this gradient is of")
            try:
                self._groups.connect(found, self._reduction.worker)
                untouched = self._reduce(found)
            except ReduceFailedError as error:
                self._adapter.reattach()
                self._synchronize()  # at once, as the others may still be in this round
                self._load()  # without the buffers of this forward, which counts for nothing
                return self._stale(str(error))
            with self._reduction.finishing():  # the others have the same sum
                result = self._client.model.exchange(
                    gradients=self._adapter.gradients.memory,
                    weights=None,
                    samples=push.samples,
                    batches=push.batches,
                    groups_json=push.groups_json,
                    base=self.version,
                    reduce_round=found.number,
                )
            if result.status in ("applied", "duplicate"):
                self._step(found, untouched)
            self._load()
            return result

    def _find_round(self, push: Push) -> ReduceAnswer | None:
        """Return the round of this gradient; None if this worker has newer weights by now."""
        is_partial = bool(self._adapter.absent(self._adapter.grads()))
        while self._own_version == self.version:
            found = self._ask(push.samples, push.groups_json, is_partial)
            if found.kind == "gradients":
                return found
            self._carry_out(found)
        return None

    def _stale(self, reason: str) -> PushResult:
        return PushResult("stale", self.version, reason=f"STALE: {reason}")

    def _reduce(self, found: ReduceAnswer) -> frozenset[int]:
        """Add up the gradients, and collect the buffers, of all workers of the round.

        Returns:
            The tensors without a gradient on any worker.
        """
        grads = self._gather()
        self._check_buffers()
        if self._sums.memory is not self._groups.memory:
            self._sums = self._new_sums()
        place = found.workers.index(self._reduction.worker)
        parts = self._sums.fill(grads, share_of_samples(found.samples)[place])
        counts = torch.tensor([float(grad is not None) for grad in grads])
        self._collected = self._groups.reduce(
            chain(parts, [counts] if found.is_partial else []),
            self._own["buffer"].clone(),
            self._is_open(found),
        )
        indices = self._adapter.trainable.spec_indices
        is_untouched = (counts == 0).tolist() if found.is_partial else ()
        return frozenset(compress(indices, is_untouched))

    def _gather(self) -> Sequence[Tensor | None]:
        """Return the gradients in the order of the flat buffer, and copy the buffers to it."""
        adapter, grads = self._adapter, self._adapter.grads()
        adapter.check_registered()
        if adapter.device.type == "cuda":
            absent = adapter.gather()
            indices = adapter.trainable.spec_indices
            return [
                None if index in absent else own
                for index, own in zip(indices, self._own_gradients, strict=True)
            ]
        for name, grad in zip(adapter.trainable.names, grads, strict=True):
            if grad is not None:
                refuse_sparse(name, grad)
        adapter.reattach()
        adapter.write_buffers()
        adapter.changes.step(adapter.absent(grads))
        return grads

    def _step(self, found: ReduceAnswer, untouched: frozenset[int]) -> None:
        """Make the step that the servers would make."""
        assert self._own_version is not None
        version, self._own_version = self._own_version + 1, None  # until all has changed
        partition, optimizer = self._partition, self._optimizer
        self._sums.finish(self._settings.clip_norm)
        if found.groups_json:
            optimizer.groups = groups_from_json(found.groups_json, self._settings)
        optimizer.step(self._sums.buffers, untouched)
        parts = [RoleBuffers({"buffer": each}, partition.ranges) for each in self._collected]
        for segment in partition.segments["buffer"]:
            values = [partition.view_segment(part, segment) for part in parts]
            target = partition.view_segment(self._weights, segment)
            shares = share_of_samples(found.samples)
            mean_of_values(target, values[:1] if segment.is_first else values, shares)
        self._own_version = version

    def close(self) -> None:
        self._client.model.offer_with(lambda: None)
        with self._lock:
            self._groups.close()
