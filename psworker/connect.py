"""How a script gets its job: from its environment, unless it says otherwise."""

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
    """Joins the job that the servers run; the script's first call.

    servers: "HOST:PORT,..." of any of the servers; default PS_SERVERS. rank: default
    PS_WORKER_RANK. device: auto, cpu, cuda or cuda:K; default PS_DEVICE, then auto. cuda spreads
    workers over the GPUs of this machine by their rank, and who has none takes the first; auto
    does so too, or takes the CPU where there is no GPU. ps-worker and ps-run set all three. For
    `tensor.cuda()` and pinned memory to mean the worker's GPU call
    `torch.cuda.set_device(job.device)`. connect_timeout: seconds that servers may be silent;
    default PS_CONNECT_TIMEOUT, then 60. wait_timeout: seconds that a step or a request for data
    may wait for other workers.

    With PS_LOCAL=1 in the environment there are no servers: the script trains alone, in this
    process, for debugging.

    Raises InvalidRequestError where the environment says nothing, UnreachableError,
    MismatchError.
    """
    rank = rank_of(rank, os.environ)
    place = choose_device(device or os.environ.get("PS_DEVICE") or "auto", rank or 0)
    from psworker.job import Job

    if is_on("PS_LOCAL"):
        from psworker.client.local_client import LocalClient

        return Job(LocalClient(), rank or 0, place)
    if not servers and not os.environ.get("PS_SERVERS"):
        raise InvalidRequestError(
            "no servers to train with: start the script with `ps-run ... SCRIPT` (a whole job on "
            "this machine) or "
            "`ps-worker --ps HOST:PORT SCRIPT` (one worker), set PS_SERVERS=HOST:PORT, or set "
            "PS_LOCAL=1 to train alone"
        )
    from psworker.client.client import Client

    client = Client(
        servers or None,
        rank=rank,
        device=str(place),
        connect_timeout=connect_timeout,
        wait_timeout=wait_timeout,
    )
    return Job(client, client.worker - 1 if rank is None else rank, place)


def choose_device(wanted: str, rank: int) -> "torch.device":
    """The torch device of that name; "auto" and "cuda" spread workers over the GPUs; where there
    is none "auto" is the CPU. The device of a GPU has its number: torch's current device is not
    the same in all threads.
    """
    import torch

    try:
        device = torch.device("cuda" if wanted == "auto" else wanted)
    except RuntimeError:
        raise InvalidRequestError(
            f"device {wanted!r} is not one of auto, cpu, cuda, cuda:K"
        ) from None
    if (
        device.type == "cpu"
    ):  # not even asked for a GPU: once torch was, forks of this process cannot use it
        return device
    if device.type != "cuda":
        raise InvalidRequestError(f"device {wanted!r} is not one of auto, cpu, cuda, cuda:K")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "auto" and not count:
        return torch.device("cpu")
    if (device.index or 0) >= count:
        raise InvalidRequestError(
            f"device {wanted}: torch {torch.__version__} sees {count} GPUs on this machine"
        )
    return torch.device("cuda", rank % count) if device.index is None else device
