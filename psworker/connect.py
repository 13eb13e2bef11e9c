"""`connect`: join the job that arguments or the environment name."""

import os
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from pscommon.core.errors import InvalidRequestError, TrainingOver
from psworker.core.group_place import GroupPlace
from psworker.session.arguments import group_place, is_on, use_place

if TYPE_CHECKING:
    import torch

    from psworker.core.protocols import JobClient
    from psworker.job import Job


def connect(
    servers: str | Sequence[str] | None = None,
    *,
    rank: int | None = None,
    device: str | None = None,
    connect_timeout: float | None = None,
    wait_timeout: float = 600.0,
    training: str | None = None,
) -> "Job":
    """Join the job that the servers run: the script's first call.

    A script that trains several models one after another, as in k-fold cross-validation, connects
    and closes the job for each. A job is a sequence of trainings, each with its own model,
    optimizer, passes and collective results. The first worker that names a new training begins
    it, once the current one has no member left. Its snapshots are then set aside.

    With PS_LOCAL=1 in the environment there are no servers: the script trains alone, in this
    process, for debugging.

    Where servers use TLS or tokens, PS_TLS_CA, PS_TLS_CERT, PS_TLS_KEY and PS_TOKEN_FILE name this
    process's files; ps-worker and ps-run set them. The token of a job of the same user on this
    machine is found without them. PS_INSECURE=1 permits a token in plain text to other machines.

    Args:
        servers: "HOST:PORT,..." of any of the servers. Default: PS_SERVERS, which ps-worker and
            ps-run set, then those that the engine's environment names, such as TF_CONFIG.
        rank: 0, 1, ... among the workers that start together. Default: PS_WORKER_RANK, then the
            rank in the engine's environment.
        device: auto, cpu, cuda or cuda:K. Default: PS_DEVICE, then auto. cuda spreads workers
            over the GPUs of this machine by their rank; a worker without a rank takes the first
            GPU. auto is cuda, or cpu on a machine without a GPU. If `tensor.cuda()` and pinned
            memory shall use the worker's GPU, call `torch.cuda.set_device(job.device)`.
        connect_timeout: Seconds that servers may be silent. Default: PS_CONNECT_TIMEOUT, then 60.
        wait_timeout: Seconds that a step, a request for data or a new training may wait for other
            workers.
        training: Name of the training, the same on all workers. None: the number of connects in
            this process before this one, "0", "1" and so on.

    Returns:
        The job; use it in a `with` block, or call its `close` at the end.

    Raises:
        InvalidRequestError: No servers are named, an argument is out of range, or this process
            has not closed its last job.
        AuthenticationError: The servers refuse this process's certificate or token, or it refuses
            theirs.
        UnreachableError: The servers do not answer.
        MismatchError: The servers run another job, or are not one complete set.
        TrainingOver: The training is over. A script that was started again goes on with its next
            one.
        WaitTimeoutError: Workers are still in another training; the message names them.
    """
    rank = use_place(servers, rank, os.environ)
    place = group_place(os.environ)
    on_machine = (rank or 0) * place.size + place.rank if place else rank or 0
    chosen = choose_device(device or os.environ.get("PS_DEVICE") or "auto", on_machine)
    from psworker.job import Job

    is_local = is_on("PS_LOCAL")
    if not is_local and not servers and not os.environ.get("PS_SERVERS"):
        raise InvalidRequestError(
            "cannot connect: no servers are named. Try: start the script with `ps-run ... SCRIPT` "
            "(a job on this machine) or `ps-worker --ps HOST:PORT SCRIPT`, or set PS_SERVERS or "
            "PS_LOCAL=1"
        )
    from pscommon.core.limits import WORKERS_PER_GENERATION

    name = connects.begin(training, is_local)
    shown = f"{place.size} ranks, {chosen.type}" if place else str(chosen)

    def connect_worker() -> "JobClient":
        if is_local:
            from psworker.client.local_client import LocalClient

            return LocalClient(name)
        from psworker.client.client import Client

        return Client(
            servers or None,
            rank=rank,
            device=shown,
            connect_timeout=connect_timeout,
            wait_timeout=wait_timeout,
            training=name,
        )

    try:
        client = (
            connect_worker()
            if place is None
            else _in_group(place, chosen, connect_worker, servers, wait_timeout, name, is_local)
        )
    except TrainingOver:
        connects.count += 1
        raise
    if rank is None:
        rank = (max(1, client.worker) - 1) % WORKERS_PER_GENERATION
    job = Job(client, rank, chosen)
    if is_local:
        from psworker.session.batch_trial import trial_of_process

        job.session.trial = trial_of_process()
    return connects.opened(job)


def _in_group(
    place: GroupPlace,
    device: "torch.device",
    connect_worker: "Callable[[], JobClient]",
    servers: str | Sequence[str] | None,
    wait_timeout: float,
    training: str,
    is_local: bool,
) -> "JobClient":
    """Return this rank's client: rank 0 connects the worker."""
    from pscommon.system.imports import installed
    from psworker.client.client import Client
    from psworker.core.clock import Clock
    from psworker.group.client import GroupClient
    from psworker.group.process_group import join_process_group, open_link

    link = open_link(place, os.environ)
    join_process_group(place, device)
    link.timeout = wait_timeout
    return GroupClient(
        link,
        connect_worker,
        {"release": installed("paramserver"), "training": training, "device": device.type},
        Clock(time.monotonic, time.sleep),
        None if is_local else partial(Client, servers or None, observe=True),
    )


class Connects:
    """The connects of this process, which name its trainings.

    Attributes:
        count: Connects to a training that exists or existed.
    """

    def __init__(self) -> None:
        self.count = 0
        self._job: weakref.ref[Job] | None = None
        self._pid = 0
        self._local: set[str] = set()

    def begin(self, training: str | None, local: bool = False) -> str:
        """Return the name of the training to connect to.

        Args:
            training: The name that the script gives; None: the count.
            local: There are no servers, so a name can be used once.

        Raises:
            InvalidRequestError: The last job is open, or the name is not valid.
            TrainingOver: The local training is over.
        """
        job = self._job() if self._job is not None else None
        if job is not None and not job.session.is_closed and self._pid == os.getpid():
            raise InvalidRequestError(
                "cannot connect: this process has not closed its last job. Try: `job.close()`, or "
                "`with psworker.connect() as job`; several models in one training: job.optimizer "
                "with name="
            )
        from pscommon.core.limits import MAX_NAME_CHARACTERS

        name = str(self.count) if training is None else training
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARACTERS:
            raise InvalidRequestError(
                f"training={name!r} is not valid. Try: 1 to {MAX_NAME_CHARACTERS} characters"
            )
        if local and name in self._local:
            self.count += 1
            raise TrainingOver(
                f"training {name!r} is over: with PS_LOCAL=1 each name begins a new one. Try: "
                "another name"
            )
        self._local |= {name} if local else set()
        return name

    def opened(self, job: "Job") -> "Job":
        """Record the job of a successful connect, and return it."""
        self.count += 1
        self._job, self._pid = weakref.ref(job), os.getpid()
        return job


connects = Connects()


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
