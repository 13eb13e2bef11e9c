"""Process groups of torch.distributed for policy allreduce, one for each set of workers.

The first worker of a group has the store in which the workers find each other.

An operation cannot be ended: where a member is stopped, gloo's thread waits in it, and writes to
its memory when the member goes on, perhaps much later. So an operation that is given up keeps its
group and its memory, and the next round has others.
"""

import ctypes
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from pscommon.core.errors import PSError, UnreachableError
from psworker.core.results import ReduceAnswer

dist: Any = torch.distributed
"""Its names are not exported to type checkers."""

CONNECT_SECONDS = 4.0
"""Time for all workers of a group to connect. A lost one is noticed so that others go on."""

MAX_FAILED_CONNECTS_COUNT = 8
"""Groups in a row that fail to connect until a worker gives up: no loss of a worker explains that.
"""

CHECK_INTERVAL_SECONDS = 0.5
"""Time between two questions whether a round is still open."""

OPERATION_SECONDS = 120.0
"""Time without progress after which gloo ends an operation, and frees its memory. The coordinator
decides earlier, unless the lease is longer: then the round is void.
"""


MAX_PIECE_BYTES = 1 << 26
"""Bytes of one operation that sends weights. OPERATION_SECONDS suffice for them over a slow link.
"""


class ReduceFailedError(PSError):
    """A round is void: one of its workers was lost or gave it up."""


class ProcessGroups:
    """The store of this worker, its newest process group, and the memory of its operations.

    Invariant: no operation of a group before the current one writes to `memory`, and operations
    write to no other memory of the caller. One thread uses it.

    Attributes:
        memory: Bytes for the caller's operations, zeros at first; a failed operation takes them
            away.
        address: HOST:PORT of this worker's store.
    """

    def __init__(self, host: str, nbytes: int) -> None:
        """Listen on one address only.

        Args:
            host: The address at which other workers reach this one.
            nbytes: Size of `memory`.
        """
        self.memory = torch.zeros(nbytes, dtype=torch.uint8)
        self._host = host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)  # torch's listens on all
        port = listener.getsockname()[1]
        self._store: Any = dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self.address = f"{host}:{port}"
        self._number = self._failed_connects_count = 0
        self._group: Any = None
        self._works: list[Any] = []  # the newest operations of the group
        self._given_up: list[tuple[Any, Sequence[Any]]] = []

    def drop(self) -> None:
        """Let the next round have another group, and memory that no operation uses."""
        if self._group is not None:
            self._given_up.append((self._group, self._works))
            self.memory = torch.zeros_like(self.memory)
        self._number, self._group, self._works = 0, None, []
        self._forget_ended()

    def close(self) -> None:
        """Free store, groups and threads. May be called again."""
        self._given_up.append((self._group, self._works))
        self._group, self._works, self._store = None, [], None
        self._forget_ended()
        for group, _ in self._given_up:
            # its destructor would wait for the operation, and so would the end of the process
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        self._given_up = []

    def _forget_ended(self) -> None:
        self._given_up = [
            (group, works)
            for group, works in self._given_up
            if not all(work.is_completed() for work in works)
        ]

    def connect(self, found: ReduceAnswer, worker: int) -> None:
        """Form the group of a round, unless it exists.

        Raises:
            ReduceFailedError: A worker does not come.
            UnreachableError: That was so MAX_FAILED_CONNECTS_COUNT times in a row.
        """
        if self._group is not None and found.group == self._number:
            return
        self.drop()
        host, _, port = found.address.rpartition(":")
        try:
            store = dist.TCPStore(
                host, int(port), is_master=False, timeout=timedelta(seconds=CONNECT_SECONDS)
            )
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=self._host)]
            options._timeout = timedelta(seconds=CONNECT_SECONDS)
            prefix = dist.PrefixStore(f"group {found.group}", store)
            self._group = gloo(prefix, found.workers.index(worker), len(found.workers), options)
        except RuntimeError as error:
            self._failed_connects_count += 1
            problem = f"the process group failed: {_first_line(error)}"
            if self._failed_connects_count < MAX_FAILED_CONNECTS_COUNT:
                raise ReduceFailedError(problem) from None
            raise UnreachableError(
                f"workers of this job do not reach each other: {problem}. Try: open all ports "
                "between their hosts, or policy sync"
            ) from None
        self._number, self._failed_connects_count = found.group, 0

    def reduce(
        self, sums: Iterable[Tensor], own: Tensor, is_open: Callable[[], bool]
    ) -> list[Tensor]:
        """Add up tensors over the group, in place, and return `own` of each worker, in order.

        sums: Views of `memory`, or tensors of no other use, like `own`. Each begins as it comes.

        Raises:
            ReduceFailedError: The round is void.
        """
        found = [torch.empty_like(own) for _ in range(self._group.size())]
        with self._operations() as works:
            adding = _options(dist.AllreduceOptions())
            works += (self._group.allreduce([each], adding) for each in sums)
            if len(own):
                collecting = _options(dist.distributed_c10d.AllgatherOptions())
                works.append(self._group.allgather([found], [own], collecting))
            _wait(works, is_open)
        return found

    def send(self, tensor: Tensor, source: int, is_open: Callable[[], bool]) -> None:
        """Copy a tensor of the worker at this place of the group to all others, in place.

        The tensor is of no other use. Errors as in `reduce`.
        """
        options = _options(dist.BroadcastOptions())
        options.rootRank, options.rootTensor = source, 0
        with self._operations() as works:
            parts = torch.split(tensor, MAX_PIECE_BYTES // tensor.itemsize)
            works += (self._group.broadcast([part], options) for part in parts)
            _wait(works, is_open)

    @contextmanager
    def _operations(self) -> Iterator[list[Any]]:
        """Yield a list for operations; give them up with the group if the body fails."""
        self._works = list[Any]()
        try:
            yield self._works
        except BaseException:  # also a signal, or that the script's gradient has NaN
            self.drop()
            raise


def _wait(works: Iterable[Any], is_open: Callable[[], bool]) -> None:
    """Wait for operations.

    Raises:
        ReduceFailedError: One has failed, or the round is void.
    """
    for work in works:
        while not _has_ended(work):
            if not is_open():
                raise ReduceFailedError("the reduce failed: its round is void")


def _has_ended(work: Any) -> bool:
    """Wait for an operation; return whether it has ended.

    Raises:
        ReduceFailedError: It has failed.
    """
    try:
        work.wait(timedelta(seconds=CHECK_INTERVAL_SECONDS))
    except RuntimeError as error:
        if work.is_completed():
            raise ReduceFailedError(f"the reduce failed: {_first_line(error)}") from None
        return False
    return True


def _options(options: Any) -> Any:
    options.timeout = timedelta(seconds=OPERATION_SECONDS)
    return options


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
