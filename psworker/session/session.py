"""One script's run: the parts of a job that its optimizer and its loaders share.

A worker that loses its membership rejoins the job here, and a worker that is asked to leave gives
its membership up here.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from os import PathLike
from typing import Never, Protocol, TypeVar

from pscommon.core.errors import FencedError, InvalidRequestError, PSError, QuarantinedError
from pscommon.telemetry.logs import get_logger
from psworker.core.protocols import JobClient
from psworker.core.results import PushResult
from psworker.session import metrics
from psworker.session.batch_trial import BatchTrial
from psworker.session.consumed_batches import ConsumedBatches
from psworker.session.drain import DrainedError, Stopping
from psworker.session.open_loops import LoopBatches, OpenLoops
from psworker.session.step_stats import StepStats

T = TypeVar("T")

LEAVE_REASON = "this worker was asked to leave"

MAX_REJOINS = 5
"""Rejoins in a row before any request of the worker has succeeded."""

log = get_logger(__name__)


class TrainedModel(Protocol):
    """What a session needs of the job's model.

    Attributes:
        result: Outcome of the last step that was decided; None before the first.
    """

    @property
    def result(self) -> PushResult | None: ...

    def pull(self) -> None:
        """Load the job's newest weights into the model."""

    def refresh(self, keeps_weights: bool) -> None:
        """Load what the job has newer; nothing if weights that the script has set are to stay."""

    def store_buffers(self, takes_changes: bool) -> None:
        """Send buffers without an average that the script has changed since its last step.

        takes_changes: There are such changes that count. Otherwise only send weights that the
            servers lack (policy allreduce).
        """

    def wait(self) -> None:
        """Wait until no push is under way."""

    def save(self, file: str | PathLike[str]) -> None:
        """Write the job's newest weights to a safetensors file."""

    def drop(self, error: PSError) -> None:
        """End or drop a push under way: the worker has lost its membership."""

    def renew(self) -> None:
        """Load all of the job's weights: the worker has a new membership."""


class JobFacts:
    """Read-only properties of the job, as of the last answer of the servers."""

    def __init__(self, client: JobClient) -> None:
        self.client = client

    @property
    def training(self) -> str:
        """The name of the training, see `psworker.connect`."""
        return self.client.training

    @property
    def version(self) -> int:
        """Number of updates in the job's weights, as far as this worker knows."""
        return self.client.version

    @property
    def policy(self) -> str:
        """The policy of the servers: sync, async, ssp or allreduce; "local" without servers."""
        return self.client.policy

    @property
    def workers(self) -> int:
        """Number of workers that train now, as of the last heartbeat (at most 1 s old).

        Before training starts: the larger of the workers that have joined and `--min-workers`.
        """
        return self.client.workers

    @property
    def is_first(self) -> bool:
        """True on exactly one of the workers that train, for work that one worker does for all.

        Before the first step: True on the worker with rank 0.
        """
        return self.client.is_first

    @property
    def stopping(self) -> bool:
        """True if the job ends or this worker was asked to leave.

        The next batch, pass or step then raises `psworker.Stopping`.
        """
        return self.client.stopping


class Session(JobFacts):
    """The state of one run, from the first call of the script to its last.

    Args:
        register_model: Registers a model whose parts the script has handed over, if there is one.

    Attributes:
        client: The connection to the job.
        stats: Time of the steps by phase.
        consumed: Batches that the script has received and not pushed yet.
        loops: Loops that the script is in.
        passes: Passes that the script's loaders have begun, by size of the data set and seed.
        model: The job's model; None before it is registered.
        trial: What the script runs for instead of training; None: it trains.
        is_closed: The job is closed.
    """

    def __init__(
        self, client: JobClient, register_model: Callable[["Session"], None] = lambda session: None
    ) -> None:
        super().__init__(client)
        self._register_model = register_model
        self.stats = StepStats()
        self.consumed = ConsumedBatches()
        self.loops = OpenLoops()
        self.passes: dict[tuple[int, int], int] = {}
        self.model: TrainedModel | None = None
        self.trial: BatchTrial | None = None
        self.is_closed = False
        self._stop_reason = ""  # empty until the script is to end
        self._rejoins = 0

    @property
    def has_begun(self) -> bool:
        """Whether the script has made a pass or a step."""
        return bool(self.loops.count or self.stats.steps)

    # ---- phases and steps ------------------------------------------------------------------------

    def enter(self, phase: str) -> str:
        """Begin a phase, and return the one before it. `ps-ctl workers` shows the phase."""
        before = self.stats.phase
        if phase == "wait" and self.model is not None:
            # Other workers may wait for the outcome of this worker's last push.
            self.model.wait()
        self.stats.enter(phase)
        self.client.show_progress(self.stats.progress())
        return before

    def finish_step(self, samples: int, exchange: Mapping[str, float]) -> None:
        """Count a step and the time of its phases. exchange: PushResult.seconds."""
        self.stats.finish_step(samples, exchange)
        metrics.step(self.stats.last, samples)
        if self.trial is not None and self.trial.finish_step(samples):
            self.stop("the trial is complete")
        self.client.show_progress(self.stats.progress())

    def require_model(self, refusal: str) -> TrainedModel:
        """Return the job's model, registered now if necessary.

        Raises:
            InvalidRequestError: There is none. refusal: How the message begins.
        """
        if self.model is None:
            self._register_model(self)
        if self.model is None:
            raise InvalidRequestError(
                f"{refusal}: there is no model yet. Try: call job.optimizer first"
            )
        return self.model

    def read_seed(self) -> int:
        """Return the job's seed, which the first worker has given that registered its model.

        Raises:
            InvalidRequestError: There is no model yet.
        """
        self.require_model("cannot begin this pass")
        return self.client.seed

    def pull(self) -> None:
        """Load the job's newest weights into the model."""
        model = self.require_model("cannot load weights")
        before = self.enter("pull")
        model.pull()
        self.enter(before)

    def refresh(self, keeps_weights: bool) -> None:
        """Load what the job has newer than the model.

        keeps_weights: Weights that the script has set stay until its next step or pull.
        """
        model = self.require_model("cannot load weights")
        before = self.enter("pull")
        model.refresh(keeps_weights)
        self.enter(before)

    def store_buffers(self) -> None:
        """Send what the script has changed after its last step, like the weights of an averaged
        teacher: a resumed job has it, too.
        """
        if not self._stop_reason:
            before = self.enter("push")
            self._store_buffers()
            self.enter(before)

    def _store_buffers(self, is_abandoned: bool = False) -> None:
        if self.model is not None:
            self.model.store_buffers(bool(self.stats.steps) and not is_abandoned)

    @contextmanager
    def running_loop(self, batches: LoopBatches, trains: bool) -> Iterator[None]:
        """Count a loop as open; at its end return to the job what the script did not use.

        Raises Stopping before the loop, and at its end, once the script is to end.

        trains: Gradients are on.
        """
        model = self.require_model("cannot begin this pass")
        self.check_stopping()
        self.loops.begin(batches, trains)
        if self.trial is not None and trains:
            self.trial.begin_pass(batches.spec, self.client.newest()[0].spec.optimizers)
        steps = self.stats.steps
        try:
            yield
        except GeneratorExit:  # the script has left the loop, on purpose or with an error
            if self.client.draining and not self.is_closed:
                self._leave_rounds(LEAVE_REASON, "drained", is_abandoned=False)
            raise
        finally:
            # A worker that cannot reach the job, or is no member, holds no batches any more.
            with suppress(PSError):
                batches.give_back()
            result = model.result
            self.loops.end(batches, result.version if result and self.stats.steps > steps else 0)
        self.check_stopping()

    # ---- membership ------------------------------------------------------------------------------

    def with_rejoin(self, call: Callable[[], T]) -> T:
        """Return the result of `call`, repeated after each rejoin."""
        while True:
            result: tuple[T] | None = None
            with self.rejoin_on_fence():
                result = (call(),)
                self.reset_rejoin_count()
            if result is not None:
                return result[0]

    @contextmanager
    def rejoin_on_fence(self) -> Iterator[None]:
        """Leave the body when the worker is fenced, and rejoin the job with its newest weights.

        Raises Stopping where the worker was asked to leave and the body would delay that; once
        Stopping was raised, also where the body fails.
        """
        try:
            yield
        except DrainedError as error:
            self.stop(str(error), "drained")
        except FencedError as error:
            self.rejoin(error)
        except PSError as error:
            if self._stop_reason:
                raise Stopping(self._stop_reason) from error
            raise

    def check_stopping(self) -> None:
        """Raise Stopping once the script is to end."""
        if self.client.stopping:
            self.stop(LEAVE_REASON if self.client.draining else "the job ends")

    def stop(self, reason: str, retire_reason: str = "") -> Never:
        """Raise Stopping.

        retire_reason: Why the worker leaves the rounds before its last step.
        """
        self._leave_rounds(reason, retire_reason, is_abandoned=bool(retire_reason))
        raise Stopping(self._stop_reason)

    def _leave_rounds(self, reason: str, retire_reason: str, is_abandoned: bool) -> None:
        """Leave all rounds; batches that the worker has leased go to other workers.

        Afterwards the worker only observes. A job that ends has no more rounds, and admits no
        new members.

        is_abandoned: The last step was given up while it waited for other workers.
        """
        if self._stop_reason:
            return
        self._stop_reason = reason
        with suppress(PSError, Stopping):
            self._store_buffers(is_abandoned)
        log.info("training_stopped", worker=self.client.worker, reason=reason)
        self._drop_membership(DrainedError(reason))
        if self.client.draining and not self.is_closed:
            try:
                self.client.retire(retire_reason)
            except PSError as error:  # then it leaves when it closes the job
                log.debug("retire_failed", worker=self.client.worker, problem=str(error))

    def rejoin(self, error: FencedError) -> None:
        """Replace the membership that was lost with this error, and load the job's weights.

        Raises what a rejoin does not cure: QuarantinedError; FencedError where the servers went
        back to before something that the script has done, or after MAX_REJOINS in a row; Stopping
        where the worker is to leave.
        """
        client, is_renewed = self.client, False
        try:
            while not is_renewed:
                self.check_stopping()
                if isinstance(error, QuarantinedError) or self._rejoins == MAX_REJOINS:
                    raise error
                self._rejoins += 1
                log.warning(
                    "rejoin_started", worker=client.worker, job=client.job, reason=str(error)
                )
                self._drop_membership(error)
                client.rejoin()
                try:
                    if self.model is not None:
                        self.model.renew()
                    is_renewed = True
                except FencedError as again:
                    error = again
        except DrainedError as drained:
            self.stop(str(drained), "drained")
        log.info("rejoined", job=client.job, worker=client.worker, version=client.version)
        if self.loops.come_again(client.data.has_ended, client.version):
            raise FencedError(
                f"cannot continue: the servers rolled back to version {client.version}, in an "
                "earlier loop. Try: start the script again"
            )

    def reset_rejoin_count(self) -> None:
        """Record that a request has succeeded, so the membership is valid."""
        self._rejoins = 0

    def _drop_membership(self, error: PSError) -> None:
        """Use nothing of the old membership any more."""
        if self.model is not None:
            self.model.drop(error)
        for batches in self.loops.open:
            batches.forget()
        self.consumed.lose(error)
