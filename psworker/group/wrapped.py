"""Models that torch has wrapped or divided for the processes of a group.

DistributedDataParallel; FSDP2 (fully_shard); tensor-parallel plans (DTensor); pipeline stages.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from pscommon.core.errors import InvalidRequestError
from pscommon.core.limits import ALLREDUCE
from psworker.core.group_place import GroupPlace
from psworker.core.protocols import JobClient
from psworker.group.boxes import different_data
from psworker.group.client import GroupClient
from psworker.group.data_division import place_in
from psworker.model.adapter import ModelAdapter
from psworker.model.gradient_watch import GradientWatch

Share = Callable[[], float]
"""Returns the weight of this rank's gradient in the mean of the group."""

MakeAdapter = Callable[..., Any]
"""Makes the adapter of a network and its optimizers, see psworker.optim.optimizer_set."""

_shares: "WeakKeyDictionary[nn.Module, list[Share]]" = WeakKeyDictionary()
"""The share of each model's hook."""


def _class(module: str, name: str) -> Any:
    """Return a class if something has imported its module, else (), of which nothing is an
    instance: importing takes long.
    """
    return getattr(sys.modules.get(module), name, ())


class Stage(Protocol):
    """A part of a model: torch.distributed.pipelining.PipelineStage."""

    submod: nn.Module
    stage_index: int
    group_size: int


def unwrapped(
    model: nn.Module | Stage, client: JobClient, overlaps: bool
) -> tuple[nn.Module, MakeAdapter]:
    """Return the module that has the parameters, and what makes its adapter.

    model: The model, or a pipeline stage of it.
    overlaps: The script wants steps that overlap with computing, which a group does not have.

    Raises:
        InvalidRequestError: This process is in no group, so torch would average over workers; or
            the group has models of kinds that exclude each other, or overlapping steps,
            or the policy is allreduce.
    """
    if overlaps and isinstance(client, GroupClient):
        raise InvalidRequestError(
            "a group excludes overlap, PS_OVERLAP and pipeline. Try: leave them out; "
            "DistributedDataParallel overlaps its reduction with backward"
        )
    if not isinstance(model, nn.Module) and not hasattr(model, "submod"):
        raise InvalidRequestError(
            f"job.optimizer failed: {type(model).__name__} is no model. Try: a torch module, or a "
            "pipeline stage; a rank has one stage"
        )
    if client.policy == ALLREDUCE and isinstance(client, GroupClient):
        raise InvalidRequestError(
            "policy allreduce excludes groups: its workers are single processes. Try: policy sync"
        )
    stage = None if isinstance(model, nn.Module) else model
    network = model if isinstance(model, nn.Module) else model.submod
    is_wrapped = isinstance(network, DistributedDataParallel)
    inner: nn.Module = network.module if isinstance(network, DistributedDataParallel) else network
    _refuse_fsdp1(inner)
    is_spread = stage is not None or _is_spread(inner)
    if not isinstance(client, GroupClient):
        if is_wrapped or is_spread:
            raise InvalidRequestError(
                "job.optimizer failed: DistributedDataParallel, fully_shard, parallelize_module "
                "and pipeline stages need several processes, and this worker has one. Try: leave "
                "them out, or `ps-worker --group`"
            )
        return inner, ModelAdapter
    if is_wrapped and is_spread:
        raise InvalidRequestError(
            "job.optimizer failed: DistributedDataParallel around a model of which each rank has a "
            "part. Try: leave it out; the job averages over ranks with data of their own "
            "(job.batches(mesh=...))"
        )
    ranks, shared = client.model.division.ranks, client.model
    if not is_spread:
        shared.expect("DistributedDataParallel" if is_wrapped else "plain")
        if is_wrapped:
            shared.division.expect(ranks)
        return inner, ModelAdapter
    from psworker.group.spread_adapter import SpreadAdapter, reshard

    reshard(_sharded(inner))
    shared.expect("spread")
    if stage is not None:
        shared.stages[inner] = stage.stage_index
    shared.division.expect(_data_place(inner, stage, ranks))
    return inner, partial(SpreadAdapter, shared)


def _refuse_fsdp1(model: nn.Module) -> None:
    fsdp1 = _class("torch.distributed.fsdp", "FullyShardedDataParallel")
    if any(isinstance(module, fsdp1) for module in model.modules()):
        raise InvalidRequestError(
            "job.optimizer failed: FullyShardedDataParallel keeps parameters in flat tensors. Try: "
            "torch.distributed.fsdp.fully_shard (FSDP2)"
        )


def _sharded(model: nn.Module) -> list[Any]:
    """Return the modules that FSDP2 manages."""
    if "torch.distributed.fsdp" not in sys.modules:  # importing it takes long
        return []
    from psworker.group.spread_adapter import sharded_modules

    return [*sharded_modules(model)]


def _is_spread(model: nn.Module) -> bool:
    dtensor = _class("torch.distributed.tensor", "DTensor")
    return bool(_sharded(model)) or any(isinstance(each, dtensor) for each in model.parameters())


def _data_place(model: nn.Module, stage: Stage | None, ranks: GroupPlace) -> GroupPlace | None:
    """Return which part of a batch a rank computes by its model; None: that does not say it.

    ranks: The place of this rank among all ranks.
    """
    dtensor = _class("torch.distributed.tensor", "DTensor")
    meshes = {each.device_mesh for each in model.parameters() if isinstance(each, dtensor)}
    has_all = all(mesh.ndim == 1 and mesh.size() == ranks.size for mesh in meshes)
    if stage is not None:
        return GroupPlace() if stage.group_size == ranks.size and not meshes else None
    if not has_all:
        return None
    return ranks if _sharded(model) else GroupPlace()


def data_place(client: JobClient, mesh: Any) -> GroupPlace:
    """Return which part of each batch this process computes. mesh: As of Job.batches."""
    if isinstance(client, GroupClient):
        ranks = set(mesh.mesh.flatten().tolist()) if hasattr(mesh, "mesh") else set()
        for box in client.model.spread.boxes:
            if len(ranks.intersection(box.computed_by)) > 1:
                raise different_data(box.computed_by, box.name)
        return client.model.division.divide(None if mesh is None else place_in(mesh))
    if mesh is not None:
        raise InvalidRequestError(
            "job.batches failed: mesh= is for several processes, and this worker has one. Try: "
            "leave it out, or `ps-worker --group`"
        )
    return client.place


def weigh_by_samples(
    model: nn.Module | Stage, client: JobClient, share: Share, watch: GradientWatch
) -> bool:
    """Let torch compute the mean over samples where it reduces gradients over ranks.

    Its own mean is over ranks. A hook of the script stays; its means are right if all ranks have
    equally many samples.

    share: Returns the weight of this rank.
    watch: Watches the model's gradients.

    Returns:
        Whether torch reduces gradients, so that they are those of the group before a step.
    """
    if not isinstance(client, GroupClient):
        return False
    if isinstance(model, DistributedDataParallel):
        _hook(model, client, share)
        return True
    network = model if isinstance(model, nn.Module) else model.submod
    if not (sharded := _sharded(network)):
        return False
    from psworker.group.spread_adapter import has_only_replicas

    # gradients that are not reduced yet (set_requires_gradient_sync) are nowhere to be seen
    watch.record_backwards_of(network)
    for module in sharded:
        is_set = _set_reduction(module, WeighingReduceScatter(share, client))
        if not is_set or has_only_replicas(module):
            client.model.expect_equal_parts()
    return True


def _hook(model: DistributedDataParallel, client: GroupClient, share: Share) -> None:
    if model in _shares:  # of an earlier job or another optimizer: torch allows one hook
        _shares[model][0] = share
        return
    shares = [share]
    try:
        model.register_comm_hook(shares, _mean)
    except RuntimeError as error:  # the script has one
        if "register_comm_hook" not in str(error):
            raise
        client.model.expect_equal_parts()
    else:
        _shares[model] = shares


def _mean(
    shares: list[Share],
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # torch checks it
) -> Future[Tensor]:
    gradients = bucket.buffer().mul_(shares[0]())
    work: Any = dist.all_reduce(gradients, async_op=True)
    reduced: Future[Tensor] = work.get_future().then(_first)
    return reduced


def _first(future: Future[list[Tensor]]) -> Tensor:
    return future.value()[0]


class WeighingReduceScatter:
    """The reduce-scatter of FSDP2, whose mean over ranks becomes the mean over samples."""

    def __init__(self, share: Share, client: JobClient) -> None:
        self._share, self._client = share, client

    def allocate(
        self, size: Any, *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:  # as torch.distributed.fsdp asks for
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        weight = self._share() * self._client.place.size
        if weight != 1:
            input_tensor.mul_(weight)
        # since torch 2.13 the other name is deprecated
        reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return reduce(output_tensor, input_tensor, group=group, op=op, async_op=async_op)


def _set_reduction(module: Any, reduction: WeighingReduceScatter) -> bool:
    """Set the reduce-scatter of a module; return False if the script has set one."""
    with suppress(AttributeError, AssertionError, ValueError):  # torch has no public name for it
        group = module._get_fsdp_state()._fsdp_param_group
        known = type(group._reduce_scatter_comm).__module__
        if known.partition(".")[0] not in ("torch", "psworker"):
            return False
    try:
        module.set_custom_reduce_scatter(reduction)
    except (AttributeError, ValueError):  # an old torch; parameters of one module on two meshes
        return False
    return True
