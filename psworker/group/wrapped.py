"""Models that torch has wrapped for the processes of a group: DistributedDataParallel."""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from pscommon.core.errors import InvalidRequestError
from pscommon.core.limits import ALLREDUCE
from psworker.core.protocols import JobClient
from psworker.group.client import GroupClient

Share = Callable[[], float]
"""Returns the weight of this rank's gradient in the mean of the group."""

_shares: "WeakKeyDictionary[nn.Module, list[Share]]" = WeakKeyDictionary()
"""The share of each model's hook."""


def unwrapped(model: nn.Module, client: JobClient, overlaps: bool) -> nn.Module:
    """Return the model inside of DistributedDataParallel, or the model itself.

    overlaps: The script wants steps that overlap with computing, which a group does not have.

    Raises:
        InvalidRequestError: This process is in no group, so torch would average over workers; or
            the group has models of both kinds, or overlapping steps, or policy allreduce.
    """
    if overlaps and isinstance(client, GroupClient):
        raise InvalidRequestError(
            "a group excludes overlap, PS_OVERLAP and pipeline. Try: leave them out; "
            "DistributedDataParallel overlaps its reduction with backward"
        )
    if client.policy == ALLREDUCE and isinstance(client, GroupClient):
        raise InvalidRequestError(
            "policy allreduce excludes groups: its workers are single processes. Try: policy sync"
        )
    is_wrapped = isinstance(model, DistributedDataParallel)
    if isinstance(client, GroupClient):
        client.model.expect_reduced(is_wrapped)
    elif is_wrapped:
        raise InvalidRequestError(
            "job.optimizer failed: DistributedDataParallel averages over processes, and this "
            "worker has one. Try: the model without it, or `ps-worker --group`"
        )
    module: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    return module


def weigh_by_samples(model: nn.Module, client: JobClient, share: Share) -> None:
    """Let DDP, if the model is one, compute the mean over samples instead of the mean over ranks.

    A hook of the script stays; its means are right if all ranks have equally many samples.
    """
    if not isinstance(model, DistributedDataParallel) or not isinstance(client, GroupClient):
        return
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
