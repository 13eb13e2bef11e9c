"""Process groups of torch.distributed for policy allreduce, one for each membership.

The first worker of a group has the store in which the workers find each other. A group whose
member is lost stays stuck; the next one works beside it.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed
from torch import Tensor

from pscommon.core.errors import PSError
from psworker.core.results import ReduceAnswer

dist: Any = torch.distributed
"""Its names are not exported to type checkers."""

CONNECT_SECONDS = 4.0
"""Time for all workers of a group to connect. A lost one is noticed so that others go on."""

CHECK_INTERVAL_SECONDS = 0.5
"""Time between two questions whether a round is still open."""

LONGEST_SECONDS = 24 * 3600.0
"""gloo's own limit of an operation; the coordinator decides earlier."""


class ReduceFailedError(PSError):
    """A round is void: one of its workers was lost or gave it up."""


class ProcessGroups:
    """The store of this worker and its newest process group. One thread uses it."""

    def __init__(self, host: str) -> None:
        """host: The address at which other workers reach this one."""
        self._host = host
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self.address = f"{host}:{self._store.port}"
        self._number = 0
        self._group: Any = None
        self._stuck: list[Any] = []  # destroying one would wait for its operations

    def drop(self) -> None:
        """Let the next round have another group."""
        self._stuck.append(self._group)
        self._number, self._group = 0, None

    def connect(self, found: ReduceAnswer, worker: int) -> None:
        """Form the group of a round, unless it exists.

        Raises:
            ReduceFailedError: A worker does not come.
        """
        if self._group is not None and found.group == self._number:
            return
        if self._group is not None:
            self.drop()
        host, _, port = found.address.rpartition(":")
        try:
            store = dist.TCPStore(
                host, int(port), is_master=False, timeout=timedelta(seconds=CONNECT_SECONDS)
            )
            own: Any = dist.ProcessGroupGloo
            options = own._Options()
            options._devices = [own.create_device(hostname=self._host)]
            options._timeout = timedelta(seconds=CONNECT_SECONDS)
            prefix = dist.PrefixStore(f"group {found.group}", store)
            rank = found.workers.index(worker)
            self._group = own(prefix, rank, len(found.workers), options)
            self._store_in_use = store
        except RuntimeError as error:
            raise ReduceFailedError(f"the process group failed: {_first_line(error)}") from None
        self._number = found.group

    def sum(self, tensors: Sequence[Tensor], is_open: Callable[[], bool]) -> None:
        """Add up tensors over the group, in place."""
        options: Any = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=LONGEST_SECONDS)
        self._wait([self._group.allreduce([each], options) for each in tensors], is_open)

    def send(self, tensor: Tensor, source: int, is_open: Callable[[], bool]) -> None:
        """Copy a tensor of the worker at this place of the group to all others, in place."""
        options: Any = dist.BroadcastOptions()
        options.timeout = timedelta(seconds=LONGEST_SECONDS)
        options.rootRank, options.rootTensor = source, 0
        self._wait([self._group.broadcast([tensor], options)], is_open)

    def _wait(self, works: Sequence[Any], is_open: Callable[[], bool]) -> None:
        for work in works:
            while True:
                try:
                    work.wait(timedelta(seconds=CHECK_INTERVAL_SECONDS))
                    break
                except RuntimeError as error:
                    if work.is_completed() or not is_open():
                        text = f"the reduce failed: {_first_line(error)}"
                        raise ReduceFailedError(text) from None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
