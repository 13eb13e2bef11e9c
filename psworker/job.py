"""`Job`: a training job as a script sees it: optimizer, share of the data, progress."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, SupportsFloat

import torch
from torch import nn

from pscommon.core.errors import InvalidRequestError, PSError
from pscommon.core.limits import ALLREDUCE
from pscommon.core.model_spec import Treatment
from pscommon.telemetry.logs import get_logger
from psworker.core.protocols import JobClient
from psworker.core.results import PushResult
from psworker.data.batches import BatchLoader
from psworker.data.data_source import LoaderArguments, PassSettings
from psworker.data.loader import make_loader
from psworker.data.random_state import script_seed
from psworker.group.wrapped import Stage, data_place, unwrapped, weigh_by_samples
from psworker.optim.optimizer import ServerOptimizer
from psworker.optim.optimizer_set import DEFAULT_NAME, OptimizerSet, fast_forward
from psworker.optim.served_model import StepStrategyName, reduced
from psworker.session.arguments import is_on
from psworker.session.collectives import ScriptCollectives
from psworker.session.drain import DrainedError, Stopping
from psworker.session.resume_notice import log_if_finished
from psworker.session.session import JobFacts, Session

log = get_logger(__name__)


class Job(JobFacts):
    """A training job as a script sees it; made by `psworker.connect`.

    Use it in a `with` block, or call `close` at the end.

    Attributes:
        client: The connection to the servers.
        rank: 0, 1, ... among the workers that started together, for logs and tests.
        device: Where the operator wants this worker to compute. Call `model.to(job.device)`
            before `job.optimizer`.
        stats: Time of the steps by phase, in seconds.
    """

    def __init__(
        self, client: JobClient, rank: int = 0, device: torch.device | None = None
    ) -> None:
        super().__init__(client)
        self._optimizers = OptimizerSet()
        self.session = Session(client, self._optimizers.register)
        self.stats = self.session.stats
        self._collectives = ScriptCollectives(self.session)
        self.rank = rank
        self.device = device or torch.device("cpu")

    @property
    def last(self) -> PushResult | None:
        """The result of the last step; None before the first one."""
        return self._optimizers.model.result if self._optimizers.model is not None else None

    @property
    def first_version(self) -> int:
        """The job's version when this worker registered its model; 0 before."""
        return self._optimizers.model.first_version if self._optimizers.model is not None else 0

    def optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module | Stage,
        *,
        name: str = DEFAULT_NAME,
        overlap: bool | None = None,
        pipeline: bool = False,
        clip_norm: float | None = None,
        buffers: Mapping[str, Treatment] | None = None,
    ) -> ServerOptimizer:
        """Hand the model to the servers; return the optimizer to use from now on.

        Afterwards the model has the job's weights: those of the first worker, or of a resumed
        job. They are in the same Parameter objects with other storage. Do not move or cast the
        model any more. Weights that the script loads or changes later stay while it evaluates, and
        are lost with the next step; a warning says so.

        A script with several optimizers, as for a GAN, gives each a name:
        `job.optimizer(opt_d, net_d, name="d")`, then `job.optimizer(opt_g, net_g, name="g")`. Then
        the models get the job's weights together, at the first pass, `step`, `pull` or `save`.
        Each step is an update of the job, which counts one version. The first push after a batch
        commits the batch. The weight of a push is the number of samples since the last step of its
        own optimizer. docs/scripts.md has more rules.

        Args:
            optimizer: Elementwise (docs/optimizers.md), unused so far, over parameters of
                `model`. List all parameters that will ever train, and switch `requires_grad`.
                Parameter groups keep their members. Parameters that are not listed are frozen: a
                change by the script stays in this worker, and a warning says so, unless `buffers`
                names them.
            model: A module on the device where it will compute; in a group also a pipeline stage.
            name: Name of the optimizer, which precedes the names of its tensors ("d.0.weight").
                All workers use the same names. "default": it is the only optimizer of the job.
            overlap: Send gradients during backward, and let forward wait for weights layer by
                layer. The results are the same. None: PS_OVERLAP decides. Code that reads
                parameters other than through the model's modules must call `job.wait()` after
                `step()`; for a traced module backward raises an InvalidRequestError otherwise.
                Gradients may change after backward, as with GradScaler. Leave it off for models
                that torch.compile has made.
            pipeline: Under async and ssp, let `step()` return while its push is in flight. The
                next `step()` waits for it and brings its weights. A gradient then lacks the
                worker's own last push, and is that much staler. Results and errors come one step
                later, or with `job.wait()`. It excludes overlap. Without servers, and in a job
                that is set to sync later, each step ends at once.
            clip_norm: Clip the averaged gradient of each update to this L2 norm, as
                clip_grad_norm_ does under DistributedDataParallel.
            buffers: What an update makes of buffers, by pattern (fnmatch) of their names in
                `model.state_dict()`; the first pattern that matches counts. "average": the mean
                over the pushes, weighted by samples. "first": the values of the first worker's
                push. Default: "average" for floating buffers of batch-norm and instance-norm
                modules, else "first". Frozen parameters that a pattern matches travel like
                buffers: `buffers={"teacher.*": "first"}`.

        Raises:
            UnsupportedOptimizerError: The servers cannot run this optimizer.
            InvalidRequestError: An argument does not fit.
            MismatchError: The job trains another model.
        """
        overlap = is_on("PS_OVERLAP") and not pipeline if overlap is None else overlap
        network, make_adapter = unwrapped(model, self.client, overlap or pipeline)
        if pipeline and (overlap or self.policy == "sync"):
            raise InvalidRequestError(
                "pipeline=True excludes overlap=True. Try: leave out one of them"
                if overlap
                else "pipeline=True excludes policy sync: its gradients are of the newest weights. "
                "Try: policy async or ssp"
            )
        if name != DEFAULT_NAME and (overlap or pipeline):
            raise InvalidRequestError(
                "several optimizers exclude overlap and pipeline. Try: leave out overlap, pipeline "
                "and PS_OVERLAP"
            )
        strategy: StepStrategyName = "plain"
        if self.policy == ALLREDUCE:
            strategy = reduced(bool(overlap or pipeline or name != DEFAULT_NAME))
        elif pipeline and self.policy != "local":
            strategy = "pipelined"
        elif overlap:
            strategy = "overlapped"
        if self.session.model is None:
            self.client.seed = script_seed.read()
        added = self._optimizers.add(
            self.session, name, optimizer, network, clip_norm, buffers, strategy, make_adapter
        )
        added.is_reduced = weigh_by_samples(model, self.client, added.share, added.watch)
        return added

    def batches(
        self,
        dataset: Any,
        batch_size: int | None = None,
        epochs: int = 1,
        shuffle: bool | None = None,
        seed: int | None = None,
        drop_last: bool = False,
        *,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Sequence[Any]] | None = None,
        sources: int | None = None,
        reseed: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        name: str | None = None,
        mesh: Any = None,
        **loader: Any,
    ) -> BatchLoader:
        """Return a loader of this worker's share of the data: each `iter()` is the next pass.

        All workers together see each sample once a pass. The k-th pass of a loader is the same
        pass on all workers, also in a resumed job: passes that it has completed end at once, and
        `skipped` of the loader is True for them. Workers may begin the passes of different loaders
        in different orders, as with a validation every 100 steps. The k-th pass has the order of
        epoch k. Epochs go on
        counting over the calls of a script with a data set of one size. `len()` is the number of
        batches that this worker can expect of a pass; a stream has none.

        A batch counts as done with the next `optimizer.step()`. Leaving a pass early gives unused
        batches back, also to a resumed run. A pass that all workers have left for a later one is
        over. When a pass ends, the model holds the job's newest weights; after a pass without a
        step those that the script has set, if it has. Under torch.no_grad() a batch weighs
        nothing, and is done when its pass has ended. A pass inside another one, such
        as a test every 100 steps, gives nothing to a worker that comes when it has ended: a
        successor, or a resumed run.

        Args:
            dataset: Map-style, with len() and items by number; a tensor, or a tuple of tensors
                for tuples of rows. Or a stream, read in its own order: torch's IterableDataset,
                or an object with read(source, offset), see psworker.StreamDataset. Every worker
                must find the same samples in a source, whenever it reads it. shuffle does not
                apply to a stream; drop_last, samplers and DataLoader's keywords cannot. Or
                torch's DataLoader, which replaces the arguments from batch_size to loader, except
                epochs, seed, sources and reseed.
            batch_size: Samples per batch and worker.
            epochs: Passes over the data in one `for` loop, for scripts that do not call for each
                pass.
            shuffle: A new order in each pass, from (seed, epoch). None: True, unless there is a
                sampler.
            seed: Any 64-bit integer. None: the job's seed, which is the seed of torch's generator
                (torch.manual_seed) when the first worker called job.optimizer. A pass then needs a
                model, and so does its iter().
            drop_last: Leave out the last batch of an epoch if it is smaller.
            sampler: Gives the indices of a pass, in its order: each batch is the next batch_size
                of them. It runs on every worker, with the global generators of torch, numpy and
                random seeded by (seed, epoch), and must give the same order on all of them.
            batch_sampler: Gives lists of indices instead, which may differ in length: batch_size
                is left out. A step weighs as many samples as its batch has.
            sources: Number of sources of a stream, 1 by default; each is read by one worker at a
                time.
            reseed: Seed the global generators of torch, numpy and random from (seed, epoch, place
                in the epoch), before each batch is fetched and before it is given out. So
                augmentation and dropout are the same on any worker.
            collate_fn: As of torch.utils.data.DataLoader.
            name: Name of the loader, the same on all workers. None: its place among the calls
                without a name. Needed only where workers make these calls in different orders. A
                later call with this name continues its passes.
            mesh: In a group whose ranks compute a model together, the device mesh along which data
                differ, such as `mesh["dp"]`. docs/parallelism.md.
            loader: More keywords of torch.utils.data.DataLoader (num_workers, pin_memory,
                worker_init_fn).

        Raises:
            InvalidRequestError: These arguments make no loader.
            MismatchError: From a pass: other workers go through other data, or in another order
                (LOOP_MISMATCH).
        """
        arguments = LoaderArguments(
            dataset, batch_size, shuffle, drop_last, sampler, batch_sampler, collate_fn, loader
        )
        place = data_place(self.client, mesh)
        settings = PassSettings(epochs, sources=sources, reseed=reseed, name=name, place=place)
        return make_loader(self.session, arguments, settings, seed)

    def pull(self) -> None:
        """Bring the job's newest weights into the model, without a step."""
        self.session.pull()

    def wait(self) -> None:
        """Wait until the last step has ended and its weights are in the model.

        Needed only with overlap or pipeline, before the script reads or changes weights by hand.
        Raises the error of that step, if there was one.
        """
        if self._optimizers.model is not None:
            self._optimizers.model.wait()

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the job's newest weights to a safetensors file, from any worker.

        The file is replaced only when it is complete. It has all names of the state_dict, tied
        weights and buffers included: `model.load_state_dict(safetensors.torch.load_file(file))`.
        Of several optimizers, the names begin with that of the optimizer ("d.0.weight"). This
        worker's model does not change.

        Raises:
            InvalidRequestError: No file can be written there.
            NotSavedError: The disk refuses the file.
        """
        model = self.session.require_model("job.save failed")
        if self.session.trial is None:  # a trial leaves the script's files as they are
            model.save(file)

    def barrier(self) -> None:
        """Wait until every worker has made this call.

        Calls are numbered by the script: all workers must make the same collective calls
        (barrier, all_reduce, broadcast) in the same order. A worker that waits takes no part in
        updates meanwhile, so other workers train on. A worker that leaves or is lost is not
        waited for. A script that is started again repeats its calls and gets the same results.

        Raises:
            MismatchError: Another worker makes another collective call (COLLECTIVE_MISMATCH).
            WaitTimeoutError: A worker did not make the call within `wait_timeout` of
                `psworker.connect`; the message names it.
            Stopping: This worker was asked to leave, or the job ends.
        """
        self._collectives.barrier()

    def all_reduce(self, values: Mapping[str, SupportsFloat], samples: int = 1) -> dict[str, float]:
        """Return the mean of each value over all workers, weighted by `samples`, in float64.

        It waits and raises as `barrier` does. It is for metrics, not for tensors.

        Args:
            values: At most 256 numbers, or tensors with one element, by name. All workers pass
                the same names.
            samples: Weight of this worker's values, for example the number of samples that it has
                evaluated; 0: they do not count, as on the stages of a pipeline that do not know
                them. If no worker's values count, the means are NaN.
        """
        return self._collectives.all_reduce(values, samples)

    def broadcast(self, value: Any = None) -> Any:
        """Return the value of the first worker, by rank, that passes one other than None.

        It raises as `barrier` does, and waits for that worker only:
        `best = job.broadcast(evaluate() if job.is_first else None)`.

        Args:
            value: A JSON value of at most 64 KiB. JSON makes lists of tuples, and strings of keys.
        """
        return self._collectives.broadcast(value)

    def report(self, **values: SupportsFloat) -> None:
        """Report values by name, such as `loss=loss`, after any step, without waiting.

        Heartbeats send at most one value per second and name, and the newest one in any case. A
        value on a GPU is read only then. `ps-run` shows the values, its summary has the last
        ones, and `--history` writes all.

        Args:
            values: Numbers, or tensors with one element.

        Raises:
            InvalidRequestError: A value is no number.
        """
        self.client.report_soon(values)

    def resume(
        self, scheduler: torch.optim.lr_scheduler.LRScheduler, steps: int | None = None
    ) -> None:
        """Fast-forward a new scheduler to the job's progress when this worker joined.

        Args:
            scheduler: Made with the optimizer, not stepped yet.
            steps: Number of steps. Default: the job's version at `job.optimizer`, 0 in a new
                job; of several optimizers, the number of updates of the scheduler's own one, once
                the model is registered. This is right under sync for a scheduler that is stepped
                with every update.
                Under async and ssp a version is one step of one worker: divide by the number of
                workers (`optimizer.first_count // job.workers`, after job.pull() if there are
                several optimizers). For a scheduler that is stepped once per epoch, give the
                number of epochs.
        """
        if steps is None:
            self._optimizers.resume(scheduler)
        else:
            fast_forward(scheduler, steps)

    def enter(self, phase: str) -> None:
        """Begin a phase: count its time, and show it in `ps-ctl workers`."""
        self.session.enter(phase)

    def close(self, reason: str = "") -> None:
        """Leave the job; the others continue without this worker. A second call does nothing.

        Batches that were leased and not pushed go back. Without a reason, first wait for a step
        that is still in flight, and raise its error.

        Args:
            reason: Why the worker leaves, if it is not done.
        """
        if self.session.is_closed:
            return
        self.session.is_closed = True
        try:
            if not reason:
                self.wait()
                self.session.store_buffers()
                log_if_finished(self.session, self.rank, self.first_version)
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._leave(reason)

    def _leave(self, reason: str) -> None:
        try:
            self._optimizers.close()
            if not reason:
                with suppress(PSError, Stopping):  # lost reports are no failure of the script
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
            log.warning("leave_failed", problem=str(trouble))  # `error` is what the user must see
        return None
