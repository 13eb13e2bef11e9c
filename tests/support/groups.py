"""Groups whose ranks are threads of this process."""

import itertools
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pscommon.core.errors import TooFewWorkersError
from psworker import Job
from psworker.core.clock import Clock
from psworker.core.group_place import GroupPlace
from psworker.core.protocols import JobClient
from psworker.group.client import GroupClient
from psworker.group.link import GroupLink

T = TypeVar("T")

_numbers = itertools.count()


def as_group(
    size: int,
    connect: Callable[[], JobClient],
    script: Callable[[Job, int], T],
    timeout: float = 20.0,
) -> list[T]:
    """Return the results of a script on each rank; raise the error of a rank.

    Args:
        size: Number of ranks.
        connect: Returns the worker's client.
        script: Called with the job and the rank.
        timeout: Seconds that a rank waits for another one.
    """
    name = f"test-{os.getpid()}-{next(_numbers)}"

    def live(rank: int) -> T:
        link = GroupLink(GroupPlace(rank, size), name)
        link.timeout = timeout
        try:
            with Job(group_client(link, connect)) as job:
                return script(job, rank)
        finally:
            link.close(is_done=True)

    with ThreadPoolExecutor(size) as ranks:
        ends = [ranks.submit(live, rank) for rank in range(size)]
    errors = [error for end in ends if (error := end.exception())]
    for error in sorted(errors, key=lambda error: isinstance(error, TooFewWorkersError)):
        raise error  # not that of a rank that ended because of another one
    return [end.result() for end in ends]


def group_client(link: GroupLink, connect: Callable[[], JobClient]) -> GroupClient:
    """Return the client of one rank; all ranks make this call."""
    return GroupClient(link, connect, {"device": "cpu"}, Clock(time.monotonic, time.sleep), None)
