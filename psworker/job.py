"""A training job as a script sees it: its optimizer, its share of the data, its place in time."""

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, SupportsFloat

import torch
from torch import nn

from pscommon.core.errors import InvalidRequestError, PSError
from psworker.core.protocols import JobClient
from psworker.core.results import PushResult
from psworker.data.batches import BatchLoader
from psworker.data.loader import loader_of
from psworker.data.torch_loader import LoaderArguments
from psworker.optim.optimizer import ServerOptimizer
from psworker.optim.schedulers import fast_forward
from psworker.session.drain import DrainedError, Stopping
from psworker.session.environment import is_on
from psworker.session.job_facts import JobFacts
from psworker.session.resume_notice import log_if_finished
from psworker.session.session import Session

log = logging.getLogger("psworker")


class Job(JobFacts):
    """A worker's part in a training job, made by `psworker.connect`.

    Use it as a context manager, or call `close` at the end.

    Attributes:
        client: The connection to the servers.
        rank: 0, 1, ... among the workers that started together, for logs and tests.
        device: Where the operator wants this worker to compute: move the model there before
            `job.optimizer`, and the batches too.
        stats: Time of the steps by phase.
        session: What the optimizer and the loaders share; not for scripts.
        first_version: The job's version at `job.optimizer`.
    """

    def __init__(
        self, client: JobClient, rank: int = 0, device: torch.device | None = None
    ) -> None:
        super().__init__(client)
        self.session = Session(client)
        self.stats = self.session.stats
        self.rank = rank
        self.device = device or torch.device("cpu")
        self.first_version = 0
        self._optimizer: ServerOptimizer | None = None

    @property
    def last(self) -> PushResult | None:
        """What became of the last step; None before the first."""
        return self._optimizer.result if self._optimizer else None

    def optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        *,
        overlap: bool | None = None,
        pipeline: bool = False,
        clip_norm: float | None = None,
    ) -> ServerOptimizer:
        """Hands the model to the servers, once a job; returns what takes the optimizer's place
        in the script.

        optimizer: elementwise (docs/optimizers.md), fresh, of parameters of `model`; list all
        that will ever train and switch requires_grad; its groups keep their members. Those that
        it lacks are frozen: changed by the script (an EMA teacher) they stay this worker's own
        until it loses its place, and snapshots keep the initial values. model: on the device
        where it will compute. Afterwards its weights are the job's (the first worker's, or those
        of a resumed job), in the same Parameter objects with other storage; do not move or cast
        it any more. Loading weights into it later, or changing them in place, is lost with the
        next step: a warning says so. overlap: gradients leave during backward, and forward waits
        layer by layer for weights that are still coming; the results are the same. None: if
        PS_OVERLAP is on in the environment. Modules that are called, and tensors that are read
        through them (parameters(), state_dict(), deepcopy), are waited for. Whoever gets at them
        in other ways calls `job.wait()` after step(). Who computes with them (a traced module)
        gets an InvalidRequestError in backward otherwise; who only looks (an EMA over a list of
        parameters kept from before) finds old weights. Gradients may be changed after backward
        in any way, as by GradScaler or `grad.data.mul_()`. Leave it off for models that
        torch.compile has made: with a wait at each module it compiles little of them. pipeline:
        in async and ssp, step() returns while its push is on its way; the next step() waits for
        it and brings its weights. So a gradient lacks the worker's own last push, and counts as
        that much staler. `job.last`, stale pushes and errors come one step later; `job.wait()`
        makes them come now. Instead of overlap. Without servers (PS_LOCAL=1) and in a job that
        is set to sync later, each step ends at once. clip_norm: the servers clip each update's
        averaged gradient to this L2 norm, as clip_grad_norm_ would under DDP.

        Raises UnsupportedOptimizerError, InvalidRequestError, MismatchError where the job trains
        another model.
        """
        if self._optimizer is not None:
            raise InvalidRequestError(
                "a job has one model and one optimizer: put all networks into one ModuleDict"
            )
        if pipeline and (overlap or self.policy == "sync"):
            raise InvalidRequestError(
                "pipeline=True and overlap=True exclude each other"
                if overlap
                else "pipeline=True needs policy async or ssp: under sync every gradient is of "
                "the newest weights"
            )
        pipelined = pipeline and self.policy != "local"
        overlapped = not pipeline and (is_on("PS_OVERLAP") if overlap is None else overlap)
        self._optimizer = ServerOptimizer(
            optimizer, model, self.session, overlapped, pipelined, clip_norm
        )
        self.session.model = self._optimizer
        self.first_version = self.version
        return self._optimizer

    def batches(
        self,
        dataset: Any,
        batch_size: int | None = None,
        epochs: int = 1,
        shuffle: bool | None = None,
        seed: int = 0,
        drop_last: bool = False,
        *,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Sequence[Any]] | None = None,
        sources: int | None = None,
        reseed: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **loader: Any,
    ) -> BatchLoader:
        """Return a loader of this worker's share of the data: each `iter()` is the next pass.

        All workers together see each sample once a pass. All workers start the same passes in
        the same order, also in a job that is resumed: passes that it has completed end at once,
        and `skipped` of the loader is True for them. The k-th pass has the order of epoch k;
        epochs go on counting over the calls of a script with a data set of one size. `len()` is
        the number of batches that this worker can expect of a pass; a stream has none.

        A batch counts as done with the next `optimizer.step()`. Leaving a pass early gives
        unused batches back, to a run that is resumed, too; one that all workers have left for a
        later pass is over. When a pass ends, the model holds the job's newest weights. Under
        torch.no_grad() a batch weighs nothing, and is done when its pass has ended. A pass
        inside another one, such as a test every 100 steps, gives nothing to a worker that comes
        when it has ended: a successor, or a run that is resumed.

        Args:
            dataset: Map-style, with len() and items by number; a tensor, or a tuple of tensors for tuples of rows.
                Or a stream, read in its own order: torch's IterableDataset, or what has read(source, offset), see
                psworker.StreamDataset. Every worker must find the same samples in a source, whenever it reads it.
                shuffle does not apply to a stream; drop_last, samplers and DataLoader's keywords cannot. Or torch's
                DataLoader, which then says all that the arguments from batch_size to loader would, but epochs, seed,
                sources and reseed.
            batch_size: Samples per batch and worker.
            epochs: Passes over the data in one `for` loop, for scripts that do not call for each pass.
            shuffle: A new order in each pass, from (seed, epoch). None: True, unless there is a sampler.
            seed: Any 64-bit integer.
            drop_last: Leave out the last batch of an epoch where it is smaller.
            sampler: Gives the indices of a pass, in its order: each batch is the next batch_size of them. It runs on
                every worker, with the global generators of torch, numpy and random seeded by (seed, epoch), and must
                give the same order on all of them.
            batch_sampler: Gives lists of indices instead, which may differ in length: batch_size is left out. A step
                weighs as many samples as its batch has.
            sources: How many a stream has, 1 by default; each is read by one worker at a time.
            reseed: Before each batch is fetched, and before it is given out, set the global generators of torch, numpy
                and random from (seed, epoch, place in the epoch), so that augmentation and dropout are the same on any
                worker.
            collate_fn, loader: As of torch.utils.data.DataLoader (num_workers, pin_memory, worker_init_fn ...).

        Raises:
            InvalidRequestError: These arguments make no loader.
            MismatchError: From a pass: other workers go through other data, or in another order (LOOP_MISMATCH).
        """
        given = LoaderArguments(
            dataset, batch_size, shuffle, drop_last, sampler, batch_sampler, collate_fn, loader
        )
        return loader_of(self.session, given, epochs, seed, sources, reseed)

    def pull(self) -> None:
        """Load the job's newest weights into the model, without a step."""
        self.session.pull()

    def wait(self) -> None:
        """Waits until the last step has ended and its weights are in the model, where overlap or
        pipeline leave that for later. Raises what the step ended with. For scripts that read or
        change weights by hand after a step.
        """
        if self._optimizer is not None:
            self._optimizer.wait()

    def save(self, file: str | os.PathLike[str]) -> None:
        """Writes the job's newest weights to a safetensors file, replaced only when it is whole.
        For any worker.

        `model.load_state_dict(safetensors.torch.load_file(file))` takes it: it has all names of
        the state_dict, tied weights and buffers included. This worker's own model does not
        change.

        Raises InvalidRequestError where no file can be written there, NotSavedError where the
        disk refuses it.
        """
        if self._optimizer is None:
            raise InvalidRequestError(
                "call job.optimizer first: before it there is no model to save"
            )
        self._optimizer.save(file)

    def report(self, **values: SupportsFloat) -> None:
        """Report values by name, such as loss=loss, after any step: numbers, or tensors with one
        element.

        Heartbeats send them, at most one per second and name, the newest in any case; a value on
        a GPU is read only then. ps-run shows them, its summary has the last ones, --history
        writes all. Raises InvalidRequestError.
        """
        self.client.report_soon(values)

    def resume(
        self, scheduler: torch.optim.lr_scheduler.LRScheduler, steps: int | None = None
    ) -> None:
        """Fast-forwards a fresh scheduler to where the job stood when this worker came.

        steps: how often to step it; by default the job's version at `job.optimizer`. That is
        right under sync for a scheduler that is stepped with every step. Under async and ssp a
        version is one step of one worker, so divide by the number of workers; for a scheduler
        stepped once an epoch give the epochs. A new job's version is 0.
        """
        fast_forward(scheduler, self.first_version if steps is None else steps)

    def enter(self, phase: str) -> None:
        """Begin a phase: count its time, and show it in `ps-ctl workers`."""
        self.session.enter(phase)

    def close(self, reason: str = "") -> None:
        """Leaves the job: others go on without this worker. reason: why, when it is not done.
        Again: does nothing.

        Leaving gives back all batches that were leased and not pushed. Without a reason it first
        waits for a step that is still on its way, and raises what that ended with.
        """
        if self.session.is_closed:
            return
        self.session.is_closed = True
        try:
            if not reason:
                self.wait()
                log_if_finished(self.session, self.rank, self.first_version)
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._leave(reason)

    def _leave(self, reason: str) -> None:
        try:
            if self._optimizer is not None:
                self._optimizer.close()
            if not reason:
                with suppress(PSError, Stopping):  # what was reported is worth no failure
                    self.session.with_rejoin(self.client.send_reports)
        finally:
            self.client.leave(reason)
            self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None or isinstance(error, DrainedError | Stopping):
            return self.close()
        try:
            self.close(reason=f"{type(error).__name__}: {error}")
        except PSError as trouble:
            log.warning("could not leave the job: %s", trouble)  # `error` is what the user must see
        return None
