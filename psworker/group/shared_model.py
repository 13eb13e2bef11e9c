"""The job's model for all ranks of a group, in memory that they share.

Rank 0 makes one memory with the flat buffers of the exchange, weights and gradients, and a part
for each rank: of a model that each rank has, a flat buffer of gradients. A step has four
stages, and all ranks meet after each:

1. Each rank gathers its gradients in its part.
2. Each rank computes an equal share of the group's gradient from all parts: the mean, weighted by
   samples. Buffers of the model are combined like those of workers. Of gradients that torch has
   reduced already (DDP) it copies its share.
3. Rank 0 exchanges the group's gradient for new weights, like a worker.
4. Each rank copies the weights.

Of a model that is spread over the ranks (psworker.group.spread_adapter), each rank writes its boxes
of the gradient and reads its boxes of the weights. Parts are only for boxes that are averaged.
"""

import base64
import mmap
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import accumulate, chain
from typing import Any, Literal

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
from psworker.core.group_place import GroupPlace
from psworker.core.protocols import BegunPush, JobClient
from psworker.core.results import PushResult
from psworker.group.boxes import Box, BoxTable, SpreadModel, counted, merged, weighted_mean
from psworker.group.calls import GroupCalls
from psworker.group.data_division import DataDivision
from psworker.model.flat_buffer import pin, tensor_of

log = get_logger(__name__)

Kind = Literal["plain", "DistributedDataParallel", "spread"]
"""How the ranks have a model: each the whole one, the same with gradients that torch reduces, or
each a part.
"""


class GroupModel:
    """The job's model on one rank (psworker.core.protocols.JobModel).

    Attributes:
        kind: How the ranks have the model; None before the first call of job.optimizer.
        division: Which part of each batch this rank computes.
        stage: Number of this rank's pipeline stage; None: it has none.
        spread: What this rank holds of a model that is spread; set before `agree`.
        table: All boxes of a model that is spread; set by `agree`.
    """

    def __init__(self, calls: GroupCalls, is_on_gpu: bool) -> None:
        self._is_on_gpu = is_on_gpu
        self.kind: Kind | None = None
        self.division = DataDivision(GroupPlace(calls.link.rank, calls.link.size))
        self.stage: int | None = None
        self.spread = SpreadModel((), 0)
        self.table: BoxTable | None = None
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

    def expect(self, kind: Kind) -> None:
        """Set how the ranks have the script's models."""
        kinds = {kind, self.kind or kind}
        if len(kinds) > 1 and "DistributedDataParallel" in kinds:
            raise InvalidRequestError(
                "job.optimizer failed: one model is DistributedDataParallel, and another one is "
                "not. Try: the same for all models of the job"
            )
        self.kind = "spread" if "spread" in kinds else kind

    def expect_equal_parts(self) -> None:
        """Refuse steps in which ranks have different numbers of samples."""
        self._needs_equal_parts = True

    def agree(self, spec: ModelSpec) -> PartitionPlan:
        """Register the model of all ranks; as ModelExchange.agree."""
        own = codec.model_to_proto(spec).SerializeToString(deterministic=True)

        def register(client: JobClient, found: Sequence[Any]) -> list[Any]:
            ranks = [_spread(fields) for _, _, fields in found]
            plan = client.model.agree(_full_model([each[:2] for each in found], ranks))
            return [_text(codec.model_to_proto(plan.spec).SerializeToString()), plan.shards, ranks]

        fields = [self.kind, _text(own), self.spread]
        model, shards, ranks = self._calls.gathered("agree", fields, register)
        self._plan = PartitionPlan(_model(model), shards)
        if self.kind == "spread":
            self.table = BoxTable(self._plan, list(map(_spread, ranks)))
        return self._plan

    def flat_buffers(self) -> tuple[memoryview, memoryview]:
        """Return this rank's flat buffers for gradients and weights.

        Of a model that is spread they are those of the group.
        """
        assert self._plan is not None
        nbytes, link = self._plan.nbytes, self._calls.link
        part_nbytes = nbytes if self.table is None else self.table.part_nbytes
        buffers = [nbytes, nbytes, *[part_nbytes] * link.size]
        starts = list(accumulate(map(_whole_pages, buffers), initial=0))
        total_nbytes = starts[-1]
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
            memory[start : start + size] for start, size in zip(starts, buffers, strict=False)
        )
        part = self._parts[link.rank]
        if self.table is None:
            own = torch.zeros(nbytes, dtype=torch.uint8, device="cpu", pin_memory=self._is_on_gpu)
            self._own_weights, to_pin = own.numpy().data, [part]
        else:
            self._own_weights, to_pin = self._weights, [self._weights, self._gradients, part]
        are_pinned = [pin(each) for each in to_pin if self._is_on_gpu and each.nbytes]
        if not all(are_pinned):
            log.warning("memory_not_pinned", bytes=nbytes)
        if self.table is not None:
            return self._gradients, self._weights
        return self._parts[link.rank], self._own_weights

    def views(self, box: Box) -> tuple[Tensor, Tensor | None]:
        """Return where this rank reads the weights of a box, and where it writes the gradient.

        None: another rank writes it.
        """
        assert self.table is not None
        weight = self.table.view(self._weights, box)
        if self.table.shared(box).combiner is not None:
            part = self._parts[self._calls.link.rank]
            return weight, self.table.view_of_part(part, box)
        return weight, self.table.view(self._gradients, box) if self.writes(box) else None

    def writes(self, box: Box) -> bool:
        """Return whether this rank is the lowest one that holds a box."""
        assert self.table is not None
        return self.table.shared(box).holders[0] == self._calls.link.rank

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
            if weights is not self._weights:
                self._weights[:] = weights
            client.model.start(self._weights)

        self._calls.gathered("start", None, start)  # no rank reads the weights before any more
        if weights is not self._weights:
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
            total, common = self._reduce(frozenset(absent), samples)

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
        if weights is not None and weights is not self._weights:
            stop = self._plan.section("buffer").stop
            tensor_of(weights[:stop]).copy_(tensor_of(self._weights[:stop]))
        return result

    def each_rank(self, flag: bool) -> Sequence[bool]:
        """Return what each rank passes, by rank."""
        flags: Sequence[bool] = self._calls.gathered("each_rank", flag, lambda _, found: found)
        return flags

    # ---- the group's gradient --------------------------------------------------------------------

    def _reduce(self, absent: frozenset[int], samples: int) -> tuple[int, frozenset[int]]:
        """Compute this rank's share of the group's gradient.

        Returns:
            The weight of the gradient, and the tensors that are absent on all ranks.
        """
        assert self._plan is not None
        rank, size = self._calls.link.rank, self._calls.link.size

        def combine(_: JobClient, found: Sequence[Any]) -> list[Any]:
            if self._needs_equal_parts and len({each[0] for each in found}) > 1:
                raise InvalidRequestError(
                    "the ranks of this group have different numbers of samples, and the script's "
                    "communication hook counts them alike. Try: drop_last=True in job.batches"
                )
            on = [set(each[1]) for each in found]
            holders = self.table.holders if self.table is not None else {}
            somewhere = set[int]().union(*on)
            everywhere = {
                index
                for index in somewhere
                if all(index in on[each] for each in holders.get(index, range(size)))
            }
            return [
                [each[0] for each in found],
                [each[2] for each in found],
                sorted(everywhere),
                len(somewhere) > len(everywhere),
            ]

        own = [samples, sorted(absent), self.division.place.rank]
        shares, data_ranks, everywhere, is_uneven = self._calls.gathered("push", own, combine)
        common = frozenset(everywhere)
        if is_uneven:  # a tensor that some ranks have used: the others add nothing
            self._clear(absent - common)
            self._calls.gathered("filled", None, lambda client, _: None)
        # buffers without a step are those of rank 0
        ranks = counted(range(size), data_ranks, shares)
        if self.table is not None:
            self.table.combine(rank, self._gradients, self._parts, data_ranks, shares)
        else:
            moving = ByteRange(0, self._plan.section("buffer").stop)
            self._combine(cut(moving, size)[rank], ranks)
        return sum(samples for _, samples in ranks) if any(shares) else 0, common

    def _clear(self, indices: Collection[int]) -> None:
        assert self._plan is not None
        if self.table is not None:
            for box in self.spread.boxes:
                gradient = self.views(box)[1]
                if self.table.shared(box).tensor in indices and gradient is not None:
                    gradient.zero_()
            return
        part = tensor_of(self._parts[self._calls.link.rank])
        for index in indices:
            start, stop = self._plan.extent(index)
            part[start:stop].zero_()

    def _combine(self, span: ByteRange, ranks: Sequence[tuple[int, int]]) -> None:
        assert self._plan is not None
        total = sum(samples for _, samples in ranks)
        trainable = min(max(span.start, self._plan.section("trainable").stop), span.stop)
        both = ByteRange(span.start, trainable), ByteRange(trainable, span.stop)
        for segment in chain.from_iterable(map(self._plan.segments, both)):
            dtype = getattr(torch, segment.dtype)
            into, *parts = (
                tensor_of(memory[segment.start : segment.stop]).view(dtype)
                for memory in (self._gradients, *self._parts)
            )
            if segment.start >= trainable and segment.is_first:
                into.copy_(parts[0])
            elif segment.start < trainable and self.kind == "DistributedDataParallel":
                into.copy_(parts[self._calls.link.rank])
            else:
                weighted_mean(into, [(parts[rank], samples / total) for rank, samples in ranks])


def _whole_pages(nbytes: int) -> int:
    return -(-max(1, nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE


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


def _spread(fields: Sequence[Any]) -> SpreadModel:
    boxes, parameters, stage = fields
    return SpreadModel(list(map(Box.from_json, boxes)), parameters, stage)


def _full_model(found: Sequence[Any], ranks: Sequence[SpreadModel]) -> ModelSpec:
    """Return the model of a group from kind and model of each rank.

    Raises MismatchError if they do not fit together.
    """
    for rank, (kind, model) in enumerate(found):
        if kind != found[0][0]:
            raise MismatchError(
                f"rank 0 and rank {rank} of this group have different models: {found[0][0]} and "
                f"{kind}. Try: the same wrappers on all ranks",
                "MODEL_MISMATCH",
            )
        if kind != "spread" and model != found[0][1]:
            raise MismatchError(_difference(found[0][1], model, rank), "MODEL_MISMATCH")
    if found[0][0] != "spread":
        return _model(found[0][1])
    return merged([_model(model) for _, model in found], ranks)


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
