"""What the layers above need of a job's client."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from pscommon.core.data_stream import Spec
from pscommon.core.log_entries import BatchKey
from pscommon.core.model_spec import ModelSpec
from pscommon.core.partition import PartitionPlan
from psworker.core.results import Lease, PushResult


class PushStream(Protocol):
    """A push that leaves piece by piece, and brings weights that arrive piece by piece. Made by
    `JobClient.begin`.
    """

    def send(self, start: int, stop: int) -> None:
        """Bytes [start, stop) of the gradients' tape may go now; again: what went before is
        replaced. Never blocks.
        """

    def finish(
        self,
        *,
        absent: Collection[int] = (),
        samples: int = 1,
        batches: Sequence[BatchKey] = (),
        groups_json: str = "",
    ) -> PushResult:
        """The rest goes. Returns how the push ended; its weights may still be arriving."""
        ...

    def wait(self, start: int, stop: int) -> None:
        """Until bytes [start, stop) of the weights' tape are here; raises what an exchange would
        raise.
        """

    def close(self) -> None:
        """Waits for all of it. Of a push that is not finished, or has failed: gives it up.
        Harmless to repeat.
        """


class JobClient(Protocol):
    """What a Job needs of its client: `psworker.Client` over the network, `LocalClient` without."""

    @property
    def job(self) -> str: ...
    @property
    def worker(self) -> int: ...
    @property
    def policy(self) -> str: ...
    @property
    def bad_gradients(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def open_loop(self) -> int: ...
    @property
    def draining(self) -> bool: ...
    @property
    def stopping(self) -> bool: ...
    def agree(self, spec: ModelSpec) -> PartitionPlan: ...
    def tapes(self) -> tuple[memoryview, memoryview]: ...
    def begin(self) -> PushStream: ...
    def start(self, tape: memoryview) -> None: ...
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
    ) -> PushResult: ...
    def next_batches(
        self, loop: Spec, count: int = 1, idle: bool = False, first_open: int | None = None
    ) -> Lease: ...
    def share(self, loop: Spec) -> int: ...
    def has_ended(self, loop: int) -> bool: ...
    def return_batches(self, batches: Sequence[BatchKey]) -> None: ...
    def drop_batches(self, batches: Sequence[BatchKey]) -> None: ...
    def status(self) -> Mapping[str, Any]: ...
    def newest(self) -> tuple[PartitionPlan, memoryview]: ...
    @property
    def workers(self) -> int: ...
    @property
    def is_first(self) -> bool: ...
    def report_soon(self, values: Mapping[str, Any]) -> None: ...
    def send_reports(self) -> None: ...
    def progress(
        self, *, steps: int, step_seconds: float, samples_per_second: float, phase: str
    ) -> None: ...
    def rejoin(self) -> None: ...
    def retire(self, reason: str = "") -> None: ...
    def leave(self, reason: str = "") -> None: ...
    def close(self) -> None: ...
