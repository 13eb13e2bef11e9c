"""`connect`: join the job that arguments or the environment name."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pscommon.core.errors import InvalidRequestError
from psworker.session.arguments import rank_of
from psworker.session.environment import is_on

if TYPE_CHECKING:
    import torch

    from psworker.job import Job


def connect(
    servers: str | Sequence[str] | None = None,
    *,
    rank: int | None = None,
    device: str | None = None,
    connect_timeout: float | None = None,
    wait_timeout: float = 600.0,
) -> "Job":
    """Join the job that the servers run: the script's first call.

    With PS_LOCAL=1 in the environment there are no servers: the script trains alone, in this
    process, for debugging.

    Args:
        servers: "HOST:PORT,..." of any of the servers. Default: PS_SERVERS, which ps-worker and
            ps-run set.
        rank: 0, 1, ... among the workers that start together. Default: PS_WORKER_RANK.
        device: auto, cpu, cuda or cuda:K. Default: PS_DEVICE, then auto. cuda spreads workers
            over the GPUs of this machine by their rank; a worker without a rank takes the first
            GPU. auto is cuda, or cpu on a machine without a GPU. If `tensor.cuda()` and pinned
            memory shall use the worker's GPU, call `torch.cuda.set_device(job.device)`.
        connect_timeout: Seconds that servers may be silent. Default: PS_CONNECT_TIMEOUT, then 60.
        wait_timeout: Seconds that a step or a request for data may wait for other workers.

    Returns:
        The job; use it in a `with` block, or call its `close` at the end.

    Raises:
        InvalidRequestError: No servers are named, or an argument is out of range.
        UnreachableError: The servers do not answer.
        MismatchError: The servers run another job, or are not one complete set.
    """
    rank = rank_of(rank, os.environ)
    chosen = choose_device(device or os.environ.get("PS_DEVICE") or "auto", rank or 0)
    from psworker.job import Job

    if is_on("PS_LOCAL"):
        from psworker.client.local_client import LocalClient

        return Job(LocalClient(), rank or 0, chosen)
    if not servers and not os.environ.get("PS_SERVERS"):
        raise InvalidRequestError(
            "cannot connect: no servers are named. Try: start the script with `ps-run ... SCRIPT` "
            "(a job on this machine) or `ps-worker --ps HOST:PORT SCRIPT`, or set PS_SERVERS or "
            "PS_LOCAL=1"
        )
    from psworker.client.client import Client

    client = Client(
        servers or None,
        rank=rank,
        device=str(chosen),
        connect_timeout=connect_timeout,
        wait_timeout=wait_timeout,
    )
    return Job(client, client.worker - 1 if rank is None else rank, chosen)


def choose_device(wanted: str, rank: int) -> "torch.device":
    """Return the torch device of a worker; a CUDA device has its number.

    torch's current device differs between threads, so the number is needed.

    Args:
        wanted: auto, cpu, cuda or cuda:K. "auto" and "cuda" spread workers over the GPUs by
            rank; without a GPU "auto" is the CPU.
        rank: Rank of the worker.

    Raises:
        InvalidRequestError: There is no such device.
    """
    import torch

    try:
        device = torch.device("cuda" if wanted == "auto" else wanted)
    except RuntimeError:
        raise InvalidRequestError(
            f"device {wanted!r} is not valid. Try: auto, cpu, cuda or cuda:K"
        ) from None
    # do not even ask for GPUs: forks of this process could not use them afterwards
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise InvalidRequestError(f"device {wanted!r} is not valid. Try: auto, cpu, cuda or cuda:K")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "auto" and not count:
        return torch.device("cpu")
    if (device.index or 0) >= count:
        raise InvalidRequestError(
            f"device {wanted} is not available: torch {torch.__version__} sees {count} GPUs. Try: "
            "device cpu or auto"
        )
    return torch.device("cuda", rank % count) if device.index is None else device
