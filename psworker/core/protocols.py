"""Interfaces of a job's client for the layers above it, by topic.

`psworker.Client` implements them over the network, `LocalClient` without servers.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from pscommon.core.data_stream import Spec
from pscommon.core.log_entries import BatchKey
from pscommon.core.model_spec import ModelSpec
from pscommon.core.partition import PartitionPlan
from pscommon.core.script_place import PassName, ScriptPlace
from psworker.core.clock import Clock
from psworker.core.group_place import GroupPlace
from psworker.core.results import (
    CollectiveCall,
    CollectiveResult,
    Lease,
    PushResult,
    ReduceAnswer,
    StepProgress,
    StoredState,
)


class BegunPush(Protocol):
    """A push that is sent in pieces, with weights that arrive in pieces.

    `JobModel.begin` creates it. Call order: send, finish, wait, close.
    """

    def send(self, start: int, stop: int) -> None:
        """Allow sending of bytes [start, stop) of the gradient buffer; never blocks.

        Bytes that were sent before are replaced.
        """

    def finish(
        self,
        *,
        absent: Collection[int] = (),
        samples: int = 1,
        batches: Sequence[BatchKey] = (),
        groups_json: str = "",
    ) -> PushResult:
        """Send the rest and return the outcome of the push; its weights may still be arriving.

        The arguments are those of `JobModel.exchange`.
        """
        ...

    def wait(self, start: int, stop: int) -> None:
        """Wait for bytes [start, stop) of the weights buffer; raise what an exchange raises."""

    def close(self) -> None:
        """Wait until all weights have arrived; give up a push that is not finished or has failed.

        May be called again.
        """


class JobModel(Protocol):
    """The job's model as flat buffers of plan.nbytes bytes; `ModelExchange` documents the methods.

    Attributes:
        version: Version of the weights that were pulled last.
        update_counts: Number of updates of each optimizer when the model was registered; empty
            in a job with one optimizer.
    """

    @property
    def version(self) -> int: ...
    @property
    def update_counts(self) -> Mapping[str, int]: ...
    def agree(self, spec: ModelSpec) -> PartitionPlan: ...
    def flat_buffers(self) -> tuple[memoryview, memoryview]: ...
    def begin(self) -> BegunPush: ...
    def start(self, weights: memoryview) -> None: ...
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
    ) -> PushResult: ...
    def each_rank(self, flag: bool) -> Sequence[bool]:
        """Return what each rank of this worker's group passes, by rank."""
        ...


class ReducedModel(JobModel, Protocol):
    """The job's model under policy allreduce."""

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
        reduce_round: int = 0,
        states: Mapping[str, memoryview] | None = None,
        state_json: str = "",
    ) -> PushResult: ...
    def offer_with(self, offer: Callable[[], None]) -> None: ...


class ReduceRequests(Protocol):
    """Requests of policy allreduce; `ReduceClient` documents the methods."""

    @property
    def worker(self) -> int: ...
    @property
    def own_host(self) -> str: ...
    def ask(
        self,
        version: int | None,
        samples: int,
        address: str,
        groups_json: str = "",
        is_partial: bool = False,
        completed: int = 0,
    ) -> ReduceAnswer: ...
    def is_open(self, number: int) -> bool: ...
    def uploaded_version(self) -> int: ...
    def finishing(self) -> AbstractContextManager[None]: ...
    def generation(self) -> int: ...
    def set_version(self, version: int) -> None: ...
    def download(self, weights: memoryview) -> StoredState: ...


class JobData(Protocol):
    """Batches of the job's loops; `BatchClient` documents the methods."""

    def next_batches(
        self,
        loop: Spec,
        count: int = 1,
        idle: bool = False,
        first_open: ScriptPlace | int | None = None,
    ) -> Lease: ...
    def share(self, loop: Spec) -> int: ...
    def has_ended(self, loop: PassName) -> bool: ...
    def return_batches(self, batches: Sequence[BatchKey], used: bool = False) -> None: ...


class JobInfo(Protocol):
    """What a client knows of the job and of its worker; `psworker.Client` documents it."""

    @property
    def job(self) -> str: ...
    @property
    def training(self) -> str: ...
    @property
    def worker(self) -> int: ...
    @property
    def workers(self) -> int: ...
    @property
    def is_first(self) -> bool: ...
    @property
    def policy(self) -> str: ...
    @property
    def bad_gradients(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def draining(self) -> bool: ...
    @property
    def stopping(self) -> bool: ...
    @property
    def place(self) -> GroupPlace: ...


class JobClient(JobInfo, Protocol):
    """The client of a Job; `psworker.Client` documents the methods.

    Attributes:
        model: The job's model.
        data: The job's batches.
        seed: The job's seed, or the one that this worker proposes.
    """

    seed: int

    @property
    def model(self) -> JobModel: ...
    @property
    def data(self) -> JobData: ...
    def collective(
        self, number: int, call: CollectiveCall, first_open: ScriptPlace | int
    ) -> CollectiveResult: ...
    def status(self) -> Mapping[str, Any]: ...
    def newest(self) -> tuple[PartitionPlan, memoryview, int]: ...
    def report_soon(self, values: Mapping[str, Any]) -> None: ...
    def send_reports(self) -> None: ...
    def show_progress(self, progress: StepProgress) -> None: ...
    def rejoin(self) -> None: ...
    def retire(self, reason: str = "") -> None: ...
    def leave(self, reason: str = "") -> None: ...
    def close(self) -> None: ...


class ReducingClient(JobClient, Protocol):
    """The client of a job with policy allreduce.

    Attributes:
        plan: Partition of the model's bytes.
        reduction: The requests of this policy.
    """

    @property
    def model(self) -> ReducedModel: ...
    @property
    def plan(self) -> PartitionPlan: ...
    @property
    def reduction(self) -> ReduceRequests: ...
