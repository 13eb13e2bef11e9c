"""Steps: how the gradients of one reach the servers and the new weights come back."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor, nn

from pscommon.core.errors import FencedError, PSError
from pscommon.core.log_entries import BatchKey
from pscommon.core.model_spec import ModelSpec
from pscommon.core.partition import PartitionPlan
from pscommon.telemetry.logs import get_logger
from pscommon.tracing.recorder import worker_spans
from psworker.core.protocols import JobClient
from psworker.core.results import PushResult
from psworker.model.flat_buffer import FlatBuffer

log = get_logger(__name__)


class Adapter(Protocol):
    """How a model reaches the flat buffers of the client.

    ModelAdapter documents it; in a group, SpreadAdapter implements it for models of which each
    rank has a part.
    """

    spec: ModelSpec
    gradients: FlatBuffer
    weights: FlatBuffer
    trainable_indices: Sequence[int]

    def attach(
        self,
        plan: PartitionPlan,
        memory: tuple[memoryview, memoryview],
        double_buffered: bool = False,
    ) -> None: ...
    def gather(self, optimizer: str = "") -> frozenset[int]: ...
    def scatter(self, everything: bool = False) -> None: ...
    def reattach(self) -> None: ...
    def keeps_changes(self) -> bool: ...
    def write_buffers(self) -> None: ...
    def keep_buffers(self) -> None: ...
    def gather_changed_buffers(self) -> bool: ...
    def own_buffers(self) -> Mapping[str, Tensor]: ...


@dataclass(frozen=True, slots=True)
class Push:
    """The fields of a push beside its gradients.

    Attributes:
        samples: Weight in a round's average.
        batches: Batches that the push commits.
        groups_json: The hyper-parameters of the parameter groups.
        optimizer: Name of the optimizer, in a job of several.
    """

    samples: int
    batches: Sequence[BatchKey]
    groups_json: str
    optimizer: str = ""


@dataclass(frozen=True, slots=True)
class StepContext:
    """What a step strategy works with.

    Attributes:
        adapter: The model's flat buffers.
        client: The connection to the job.
        model: The script's model.
        begin_phase: Begins a phase of the worker's time, and returns the phase before it.
        rejoin_in_forward: Context inside a forward. When the worker is fenced, it leaves the
            body and rejoins the job; the model then has the job's weights.
        wait: Waits until no push is under way.
        record_outcome: Takes the outcome of a push that was decided after `push` returned.
        is_closing: Returns whether the script makes no further step.
        rejoin: Rejoins the job after the error of a lost membership.
    """

    adapter: Adapter
    client: JobClient
    model: nn.Module
    begin_phase: Callable[[str], str]
    rejoin_in_forward: Callable[[], AbstractContextManager[None]]
    wait: Callable[[], None]
    record_outcome: Callable[[Push, PushResult], None]
    is_closing: Callable[[], bool]
    rejoin: Callable[[FencedError], None]


class PlainStep:
    """A step that sends all gradients, waits for the decision, and receives all weights.

    It is the interface of all step strategies, and their base.

    Attributes:
        is_deferred: `push` returns before the push is decided.
        is_double_buffered: The client's weights are not those of the model.
        version: Version of the job whose buffers the model has.
    """

    is_deferred: ClassVar[bool] = False
    is_double_buffered: ClassVar[bool] = False

    def __init__(self, context: StepContext) -> None:
        self._adapter = context.adapter
        self._client, self._is_closing = context.client, context.is_closing
        self._model = context.client.model
        self.version = self._model.version

    def begin(self) -> None:
        """Get what a step needs beside the weights, once the model is registered."""

    def push(self, push: Push) -> PushResult | None:
        """Send the model's gradients; return the outcome, or None if it is not known yet."""
        began = worker_spans.now()
        absent = self._adapter.gather(push.optimizer)
        if began:
            worker_spans.add_of_step("gather", began)
        result = self._model.exchange(
            gradients=self._adapter.gradients.memory,
            weights=self._adapter.weights.memory,
            absent=absent,
            samples=push.samples,
            batches=push.batches,
            groups_json=push.groups_json,
            optimizer=push.optimizer,
        )
        began = worker_spans.now()
        self._adapter.scatter()
        if began:
            worker_spans.add_of_step("scatter", began)
        self.version = result.version
        return result

    def pull(self) -> None:
        """Load the job's newest weights and buffers into the model."""
        self._adapter.reattach()
        result = self._model.exchange(gradients=None, weights=self._adapter.weights.memory)
        self._adapter.scatter()
        self.version = result.version

    def refresh(self, keeps_weights: bool) -> None:
        """Load what the job has newer than the model.

        Buffers without an average stay as the script has left them while the job has no newer ones.

        Args:
            keeps_weights: Load nothing if the script has set trained weights.
        """
        self.settle()
        if keeps_weights and self._is_agreed(self._adapter.keeps_changes()):
            return
        before = self.version
        self._adapter.reattach()
        self._adapter.write_buffers()
        self.pull()
        if self.version == before:
            self._adapter.keep_buffers()

    def store_buffers(self, takes_changes: bool) -> None:
        """Send buffers without an average that the script has changed since its last step.

        They make no update. Gradients that have left are dropped, and leave again.

        takes_changes: Such changes count.
        """
        if not takes_changes:
            return
        self.settle()
        self.skip()
        if self._is_agreed(self._adapter.keeps_changes()):
            return  # buffers of other weights than the job's
        self._adapter.reattach()
        if self._is_agreed(self._adapter.gather_changed_buffers()):
            with self._last_changes():
                self._model.exchange(
                    gradients=self._adapter.gradients.memory,
                    weights=None,
                    absent=frozenset(self._adapter.trainable_indices),
                    samples=0,
                    base=self.version,
                )

    @contextmanager
    def _last_changes(self) -> Iterator[None]:
        """Log it if the body fails to send what no later step will send."""
        try:
            yield
        except PSError as error:
            if self._is_closing():
                worker, problem = self._client.worker, str(error)
                log.warning("last_changes_not_stored", worker=worker, problem=problem)
            raise

    def newest(self) -> tuple[PartitionPlan, memoryview, int]:
        """Return the job's newest weights, as JobClient.newest."""
        return self._client.newest()

    def _is_agreed(self, own: bool) -> bool:
        """Return whether any rank of this worker's group finds it, so that all decide alike."""
        return any(self._model.each_rank(own))

    def settle(self) -> None:
        """Wait until no push is under way and its weights are in the model; raise its error.

        Here `push` waits.
        """

    def skip(self) -> None:
        """Drop the current gradients: no push follows."""

    def drop(self, error: PSError) -> None:
        """End or drop a push under way: the worker has lost its membership with this error."""

    def renew(self) -> None:
        """Load all of the job's weights, frozen tensors too: the worker has a new membership."""
        self._adapter.reattach()
        self._model.start(self._adapter.weights.memory)
        self._adapter.scatter(everything=True)
        self.version = self._model.version

    def close(self) -> None:
        """Remove all hooks from the model, without waiting."""
