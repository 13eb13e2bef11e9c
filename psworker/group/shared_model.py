"""The job's model for all ranks of a group, in memory that they share.

Rank 0 makes one memory with the flat buffers of the exchange, weights and gradients, and one flat
buffer of gradients for each rank. A step has four parts, and all ranks meet after each:

1. Each rank gathers its gradients in its own buffer.
2. Each rank computes an equal part of the group's gradient from all buffers: the mean, weighted by
   samples. Buffers of the model are combined like those of workers. Of gradients that torch has
   reduced already (DDP) it copies its part.
3. Rank 0 exchanges the group's gradient for new weights, like a worker.
4. Each rank copies the weights.
"""

import base64
import mmap
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from pscommon.core.errors import InvalidRequestError, MismatchError
from pscommon.core.log_entries import BatchKey
from pscommon.core.model_spec import ModelSpec
from pscommon.core.partition import ByteRange, PartitionPlan, cut
from pscommon.system.shared_memory import NoSharedMemoryError, SharedRegion, attach
from pscommon.telemetry.logs import get_logger
from pscommon.wire import messages as codec
from psproto.v1 import model_pb2
from psworker.core.protocols import BegunPush, JobClient
from psworker.core.results import PushResult
from psworker.group.calls import GroupCalls
from psworker.model.flat_buffer import pin, tensor_of

log = get_logger(__name__)


class GroupModel:
    """The job's model on one rank (psworker.core.protocols.JobModel)."""

    def __init__(self, calls: GroupCalls, is_on_gpu: bool) -> None:
        self._is_on_gpu = is_on_gpu
        self._is_reduced: bool | None = None
        self._needs_equal_parts = False
        self._calls = calls
        self._plan: PartitionPlan | None = None
        self._region: SharedRegion | None = None

    @property
    def version(self) -> int:
        return self._calls.facts.version

    @property
    def update_counts(self) -> Mapping[str, int]:
        return self._calls.facts.update_counts

    def expect_reduced(self, is_reduced: bool) -> None:
        """Set whether torch reduces the gradients of the script's models before `step`."""
        if self._is_reduced not in (None, is_reduced):
            raise InvalidRequestError(
                "job.optimizer failed: one model is DistributedDataParallel, and another one is "
                "not. Try: the same for all models of the job"
            )
        self._is_reduced = is_reduced

    def expect_equal_parts(self) -> None:
        """Refuse steps in which ranks have different numbers of samples."""
        self._needs_equal_parts = True

    def agree(self, spec: ModelSpec) -> PartitionPlan:
        """Register the model, which must be the same on all ranks; as ModelExchange.agree."""
        own = codec.model_to_proto(spec).SerializeToString(deterministic=True)

        def register(client: JobClient, models: Sequence[str]) -> list[Any]:
            for rank, model in enumerate(models):
                if model != models[0]:
                    raise MismatchError(_difference(models[0], model, rank), "MODEL_MISMATCH")
            plan = client.model.agree(spec)
            return [_text(codec.model_to_proto(plan.spec).SerializeToString()), plan.shards]

        model, shards = self._calls.gathered("agree", _text(own), register)
        self._plan = PartitionPlan(_model(model), shards)
        return self._plan

    def flat_buffers(self) -> tuple[memoryview, memoryview]:
        """Return this rank's flat buffers for gradients and weights."""
        assert self._plan is not None
        nbytes, link = self._plan.nbytes, self._calls.link
        step_nbytes = -(-max(1, nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        total_nbytes = (2 + link.size) * step_nbytes
        if not link.rank:
            region = SharedRegion(total_nbytes)
            self._calls.together("share", lambda client: None, partial(_share, region))
            memory = region.memory
            self._region = region  # it closes the descriptor
        else:
            self._calls.together("share", lambda client: None)
            descriptor = link.receive_descriptor()
            try:
                memory = attach(descriptor, total_nbytes)
            finally:
                os.close(descriptor)
        self._weights, self._gradients, *self._parts = (
            memory[start : start + nbytes] for start in range(0, total_nbytes, step_nbytes)
        )
        own = torch.zeros(nbytes, dtype=torch.uint8, device="cpu", pin_memory=self._is_on_gpu)
        self._own_weights = own.numpy().data
        if self._is_on_gpu and not pin(self._parts[link.rank]):
            log.warning("memory_not_pinned", bytes=nbytes)
        return self._parts[link.rank], self._own_weights

    def newest(self) -> tuple[PartitionPlan, memoryview, int]:
        """Return the weights that this rank received last, as JobClient.newest."""
        if self._plan is None:
            raise InvalidRequestError("no model is registered. Try: call job.optimizer first")
        return self._plan, self._own_weights, self.version

    def begin(self) -> BegunPush:
        raise NotImplementedError  # Job.optimizer refuses overlap in a group

    def start(self, weights: memoryview) -> None:
        """Upload rank 0's weights if this worker is the job's first; load the job's weights."""

        def start(client: JobClient, _: Sequence[Any]) -> None:
            self._weights[:] = weights
            client.model.start(self._weights)

        self._calls.gathered("start", None, start)  # no rank reads the weights before any more
        weights[:] = self._weights

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
        """Push, pull, or both, together with the other ranks; as ModelExchange.exchange.

        samples: Weight of this rank's gradient in the group's; 0: none. If no rank has any, the
            push has only buffers.
        """
        assert self._plan is not None
        common: frozenset[int] = frozenset(absent)
        total = 0
        if gradients is not None:
            shares, common = self._reduce(frozenset(absent), samples)
            total = sum(shares)

        def transfer(client: JobClient, _: Sequence[Any] = ()) -> dict[str, Any]:
            result = client.model.exchange(
                gradients=None if gradients is None else self._gradients,
                weights=None if weights is None else self._weights,
                absent=common,
                samples=total,
                batches=batches,
                groups_json=groups_json,
                base=base,
                optimizer=optimizer,
            )
            return asdict(result)

        result = PushResult(**self._calls.gathered("exchange", None, transfer))
        if weights is not None:
            stop = self._plan.section("buffer").stop
            tensor_of(weights[:stop]).copy_(tensor_of(self._weights[:stop]))
        return result

    def each_rank(self, flag: bool) -> Sequence[bool]:
        """Return what each rank passes, by rank."""
        flags: Sequence[bool] = self._calls.gathered("each_rank", flag, lambda _, found: found)
        return flags

    # ---- the group's gradient --------------------------------------------------------------------

    def _reduce(self, absent: frozenset[int], samples: int) -> tuple[list[int], frozenset[int]]:
        """Compute this rank's part of the group's gradient.

        Returns:
            The weights by rank, and the tensors that are absent on all ranks.
        """
        assert self._plan is not None

        def combine(_: JobClient, found: Sequence[Any]) -> list[Any]:
            if self._needs_equal_parts and len({each[0] for each in found}) > 1:
                raise InvalidRequestError(
                    "the ranks of this group have different numbers of samples, and the script's "
                    "communication hook counts them alike. Try: drop_last=True in job.batches"
                )
            everywhere = set[int](found[0][1]).intersection(*(each[1] for each in found))
            return [
                [each[0] for each in found],
                sorted(everywhere),
                any(len(each[1]) > len(everywhere) for each in found),
            ]

        own = [samples, sorted(absent)]
        shares, everywhere, is_uneven = self._calls.gathered("push", own, combine)
        common = frozenset(everywhere)
        if is_uneven:  # a tensor that some ranks have used: the others add nothing
            part = tensor_of(self._parts[self._calls.link.rank])
            for index in absent - common:
                start, stop = self._plan.extent(index)
                part[start:stop].zero_()
            self._calls.gathered("filled", None, lambda client, _: None)
        link = self._calls.link
        moving = ByteRange(0, self._plan.section("buffer").stop)
        self._combine(cut(moving, link.size)[link.rank], shares)
        return shares, common

    def _combine(self, span: ByteRange, shares: Sequence[int]) -> None:
        assert self._plan is not None
        rank, total = self._calls.link.rank, sum(shares)
        trainable = min(max(span.start, self._plan.section("trainable").stop), span.stop)
        both = ByteRange(span.start, trainable), ByteRange(trainable, span.stop)
        # buffers without a step are those of rank 0
        counted = [(each, share / total) for each, share in enumerate(shares) if share]
        counted = counted or [(0, 1.0)]
        for segment in chain.from_iterable(map(self._plan.segments, both)):
            dtype = getattr(torch, segment.dtype)
            into, *parts = (
                tensor_of(memory[segment.start : segment.stop]).view(dtype)
                for memory in (self._gradients, *self._parts)
            )
            if segment.start >= trainable and segment.is_first:
                into.copy_(parts[0])
            elif segment.start < trainable and self._is_reduced:
                into.copy_(parts[rank])
            else:
                _weighted_mean(into, [(parts[each], weight) for each, weight in counted])


def _weighted_mean(into: Tensor, parts: Sequence[tuple[Tensor, float]]) -> None:
    """Write the sum of the parts, each times its weight. Half precision is summed in float32."""
    if len(parts) == 1:
        into.copy_(parts[0][0])
        return
    exact = torch.promote_types(into.dtype, torch.float32)
    result = into if into.dtype is exact else torch.empty_like(into, dtype=exact)
    (first, weight), *others = parts
    torch.mul(first.to(exact), weight, out=result)
    for part, weight in others:
        result.add_(part.to(exact), alpha=weight)
    if result is not into:
        into.copy_(result)


def _share(region: SharedRegion) -> int:
    try:
        return region.share()
    except NoSharedMemoryError as error:
        raise InvalidRequestError(
            f"the ranks of a group share memory: {str(error).partition('. Try')[0]}. Try: a larger "
            "memory limit, or single processes as workers"
        ) from error


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _model(text: str) -> ModelSpec:
    return codec.model_from_proto(model_pb2.ModelSpec.FromString(base64.b64decode(text)))


def _difference(first: str, other: str, rank: int) -> str:
    """Return the message for two different models."""
    ours, theirs = _model(first), _model(other)
    mine, yours = (
        {tensor.name: (list(tensor.shape), tensor.dtype, tensor.role) for tensor in spec.tensors}
        for spec in (ours, theirs)
    )
    names = [name for name in {**mine, **yours} if mine.get(name) != yours.get(name)]
    where = (
        f"tensor {names[0]} is {mine.get(names[0])} and {yours.get(names[0])}"
        if names
        else "their optimizers or the order of their tensors differ"
    )
    return (
        f"rank 0 and rank {rank} of this group have different models: {where}. Try: the same "
        "script and arguments on all ranks"
    )
