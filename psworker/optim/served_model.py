"""The job's model after its registration: its weights, and the steps of its optimizers."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import nn

from pscommon.core.errors import (
    FencedError,
    InvalidRequestError,
    NotSavedError,
    PSError,
    SnapshotError,
)
from pscommon.snapshot import tensors_in_buffer, write_model
from pscommon.system.small_files import why_no_file
from psworker.core.results import PushResult
from psworker.session.drain import DrainedError
from psworker.session.session import Session
from psworker.steps.overlapped_step import OverlappedStep
from psworker.steps.pipelined_step import PipelinedStep
from psworker.steps.reduced_step import ReducedStep
from psworker.steps.step import Adapter, PlainStep, Push, StepContext

StepStrategyName = Literal["plain", "overlapped", "pipelined", "reduced"]

STEP_STRATEGIES: Mapping[StepStrategyName, type[PlainStep]] = {
    "plain": PlainStep,
    "overlapped": OverlappedStep,
    "pipelined": PipelinedStep,
    "reduced": ReducedStep,
}


def reduced(has_excluded: bool) -> StepStrategyName:
    """Return the strategy of policy allreduce; refuse what it excludes."""
    if has_excluded:
        raise InvalidRequestError(
            "policy allreduce excludes overlap, pipeline and named optimizers. Try: leave them "
            "out, or policy sync"
        )
    return "reduced"


class SteppingOptimizer(Protocol):
    """What a model needs of each of its optimizers."""

    def record_outcome(self, push: Push, result: PushResult) -> None:
        """Take the outcome of a push that was decided after `PlainStep.push` returned."""

    def drop(self, error: PSError) -> None:
        """Drop gradients of a membership that was lost with this error."""


class ServedModel:
    """A model whose weights are those of the job, with its optimizers (implements TrainedModel).

    Creating it registers the model; the first worker of a job uploads its weights.

    Args:
        adapter: The description of `module`, which has all tensors.
        optimizers: Its optimizers by name; the name of a single one is empty.

    Attributes:
        adapter: The model's flat buffers.
        strategy: How steps reach the servers.
        result: Outcome of the last step that was decided; None before the first.
        first_version: The job's version when the model first had its weights.
        update_counts: Number of updates of each optimizer then; empty with one optimizer.
    """

    def __init__(
        self,
        session: Session,
        module: nn.Module,
        adapter: Adapter,
        optimizers: Mapping[str, SteppingOptimizer],
        strategy: StepStrategyName,
    ) -> None:
        self.adapter = adapter
        self.result: PushResult | None = None
        self._session, self._optimizers = session, optimizers
        model, strategy_class = session.client.model, STEP_STRATEGIES[strategy]
        plan = session.with_rejoin(lambda: model.agree(adapter.spec))
        is_apart = strategy_class.is_deferred or strategy_class.is_double_buffered
        adapter.attach(plan, model.flat_buffers(), double_buffered=is_apart)
        session.with_rejoin(lambda: model.start(adapter.weights.memory))
        adapter.scatter(everything=True)
        self.update_counts = dict(model.update_counts)
        self.strategy = strategy_class(
            StepContext(
                adapter,
                session.client,
                module,
                session.enter,
                self._rejoin_in_forward,
                self.wait,
                lambda push, result: optimizers[push.optimizer].record_outcome(push, result),
                lambda: session.is_closed or session.stopping,
                session.rejoin,
            )
        )
        try:
            with torch.no_grad():
                session.with_rejoin(self.strategy.begin)
        except BaseException:
            self.strategy.close()  # the script has no model that it could close
            raise
        self.first_version = self.strategy.version

    @torch.no_grad()
    def pull(self) -> None:
        """Load the job's newest weights and buffers into the model, without a step."""
        with self._session.rejoin_on_fence():
            self.strategy.pull()

    @torch.no_grad()
    def refresh(self, keeps_weights: bool) -> None:
        """Load what the job has newer; nothing if weights that the script has set are to stay."""
        with self._session.rejoin_on_fence():
            self.strategy.refresh(keeps_weights)

    @torch.no_grad()
    def store_buffers(self, takes_changes: bool) -> None:
        """Send what the servers lack, as PlainStep.store_buffers."""
        with self._session.rejoin_on_fence():
            self.strategy.store_buffers(takes_changes)

    @torch.no_grad()
    def wait(self) -> None:
        """Wait as `Job.wait` does."""
        with self._session.rejoin_on_fence():
            self.strategy.settle()

    @contextmanager
    def _rejoin_in_forward(self) -> Iterator[None]:
        """Leave the body when the worker is fenced inside a forward, and rejoin.

        The first modules of that forward have used older weights than the rest will, so its
        gradients are void.
        """
        try:
            yield
        except DrainedError as error:
            self._session.stop(str(error), "drained")
        except FencedError as error:
            self._session.rejoin(error)
            self._session.consumed.lose(error, every_step=True)

    def save(self, file: str | PathLike[str]) -> None:
        """Write the newest weights to a safetensors file, as `Job.save` does.

        While the job has no newer version, the file has this model's values of the buffers without
        an average: the script may have changed them since its last step.

        Raises:
            InvalidRequestError: No file can be written there.
            NotSavedError: The disk refuses the file.
        """
        self.wait()
        path = Path(file)
        if problem := why_no_file(path):
            raise InvalidRequestError(f"job.save({fspath(file)!r}) failed: {problem}")
        plan, memory, newest = self.strategy.newest()
        # names and order as this worker registered them: the servers may have registered the model
        # with an older release
        own = {tensor.name: tensor for tensor in self.adapter.spec.tensors}
        by_name = dict(
            zip((t.name for t in plan.spec.tensors), tensors_in_buffer(plan, memory), strict=True)
        )
        if newest == self.strategy.version:
            by_name |= self.adapter.own_buffers()
        try:
            write_model(path, self.adapter.spec, [by_name[name] for name in own])
        except SnapshotError as error:
            raise NotSavedError(f"job.save failed: {error}") from error

    def drop(self, error: PSError) -> None:
        """End or drop a push under way: the worker has lost its membership with this error."""
        for optimizer in self._optimizers.values():
            optimizer.drop(error)
        self.strategy.drop(error)

    @torch.no_grad()
    def renew(self) -> None:
        """Load all of the job's weights: the worker has a new membership."""
        self.strategy.renew()
