"""A transformers Trainer whose optimizer steps happen on the job's servers.

    job = psworker.connect()
    trainer = Trainer(model=model, args=args, train_dataset=data, job=job)
    trainer.train()

Arguments keep their meaning. `per_device_train_batch_size` is per worker; `max_grad_norm` clips the
averaged gradient, as with DDP. Every worker evaluates the complete evaluation set with the same
weights, and takes the metrics of the first worker. Only that one writes checkpoints and logs.

Under sync the Trainer's step is the job's update. A worker that has no batch for an update makes
the step without one, so that it evaluates, saves and stops with the others. All workers therefore
make the same collective calls in the same order: two for an evaluation, two for what follows from
it, two for a checkpoint. Each pair is a barrier and a broadcast, because the steps of workers
differ under async and ssp.
"""

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
import transformers
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers.optimization import GreedyLR
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState

from psworker.data.batches import UPDATES
from psworker.integrations import check_device, refuse_checkpoint, steps_before
from psworker.integrations.training_passes import END, TrainingPasses
from psworker.job import Job

BEST = ("best_metric", "best_global_step", "best_model_checkpoint")
"""Attributes of the Trainer's state on which all workers agree."""


class Trainer(transformers.Trainer):
    """transformers.Trainer on a parameter-server job.

    Args:
        job: Result of `psworker.connect`.
        args: Arguments of transformers.Trainer.
        kwargs: Keywords of transformers.Trainer.

    Raises:
        InvalidRequestError: Resume from a checkpoint folder, or a device that is not the job's.
    """

    control: TrainerControl

    def __init__(self, *args: Any, job: Job, **kwargs: Any) -> None:
        self.job = job
        self._is_handed_over = False
        self._first_version = 0  # before the first step of this training
        self._passes: TrainingPasses | None = None
        self._epoch: dict[str, Any] = {}
        self._has_decided = self.is_stopping = False
        super().__init__(*args, **kwargs)
        check_device(job, self.args.device, "transformers")
        steps = _JobSteps()
        steps.trainer = self
        self.callback_handler.callbacks.insert(0, steps)
        self.add_callback(_DataEndsTraining(steps))

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train; a resumed job continues from its servers' snapshot."""
        refuse_checkpoint(resume_from_checkpoint)
        if self._is_handed_over:  # not the first training of this script
            self._first_version = self.job.broadcast(self.job.version)
        return super().train(None, *args, **kwargs)

    # ---- data ---------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """Return the loader of this worker's share; each epoch is one pass over it."""
        self.create_optimizer()  # the job shares a pass among registered workers
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        loader = super().get_train_dataloader().base_dataloader
        self._passes = TrainingPasses(self.job, loader, seed)
        return self._passes

    def _run_epoch(self, **epoch: Any) -> None:
        """Train until the job's ledger ends the pass; lost workers change its length."""
        passes = epoch["train_dataloader"]
        items = iter(passes)
        if passes.skipped:  # a resumed job has completed this pass
            self.state.epoch = epoch["epoch"] + 1
            return
        if passes.counts_updates:  # a worker that joins makes up for the updates of this pass
            self.state.global_step = min(self.state.global_step, passes.start - self._first_version)
        with suppress(TypeError):  # a stream keeps the Trainer's number
            epoch["steps_in_epoch"] = passes.share
        epoch["train_dataloader"] = items
        epoch["num_update_steps_per_epoch"] = sys.maxsize
        self._epoch = epoch
        super()._run_epoch(**epoch)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: Any
    ) -> Any:
        """Return the batches of a step; if there are none, the pass ends."""
        samples: list[Any] = []
        while len(samples) < num_batches and not self.control.should_training_stop:
            item = next(epoch_iterator, END)
            if item is END or (item is UPDATES and samples):
                break
            if item is UPDATES:
                self.make_up_steps(self.job_steps)
            else:
                samples.append(item)
        if not samples:
            self.is_stopping = self.control.should_training_stop
            self.control.should_epoch_stop = True
        return samples, self._get_num_items_in_batch(samples, device)

    # ---- steps --------------------------------------------------------------------------------

    @property
    def passes(self) -> TrainingPasses:
        """The training data, once the training has begun."""
        assert self._passes is not None
        return self._passes

    @property
    def job_steps(self) -> int:
        """Number of the newest step: of the job's update under sync, else of this worker's own."""
        if not self.passes.counts_updates:
            return int(self.state.global_step)
        return self.job.version - self._first_version

    def make_up_steps(self, steps: int) -> None:
        """End each step up to this number that the job has made without this worker's batches."""
        while self.state.global_step < steps and not self.control.should_training_stop:
            epoch, state, scheduler = self._epoch, self.state, self.lr_scheduler
            state.global_step += 1
            if not isinstance(scheduler, (ReduceLROnPlateau, GreedyLR)):
                scheduler.optimizer._opt_called = True  # the servers have made this step
                while scheduler.last_epoch < state.global_step:
                    scheduler.step()
            batches = (self.job.version - self.passes.start) * self.args.gradient_accumulation_steps
            state.epoch = epoch["epoch"] + min(1.0, batches / epoch["steps_in_epoch"])
            self.control = self.callback_handler.on_step_end(self.args, state, self.control)
            self._maybe_log_save_evaluate(
                self._tr_loss,
                None,
                epoch["model"],
                epoch["trial"],
                epoch["epoch"],
                epoch["ignore_keys_for_eval"],
                epoch["start_time"],
            )

    # ---- one result for all workers -------------------------------------------------------------

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the same weights on all workers; during training return one result to all."""
        if not self.is_in_train:
            return super().evaluation_loop(*args, **kwargs)
        self.passes.meet()
        output = super().evaluation_loop(*args, **kwargs)
        return output._replace(metrics=self._agree("metrics", output.metrics))

    def _determine_best_metric(self, *args: Any, **kwargs: Any) -> bool:
        """Take from the first worker what is the best, and whether to stop.

        A worker that has joined later does not know: it takes no part in its first decision.
        """
        state, control = self.state, self.control
        is_best: bool = super()._determine_best_metric(*args, **kwargs)
        best = [getattr(state, name) for name in BEST]
        is_new = not self._has_decided and self.job.first_version > 0
        self.job.barrier()
        is_best, control.should_training_stop, *best = self._agree(
            "decision", [is_best, control.should_training_stop, *best], is_asked=not is_new
        )
        for name, value in zip(BEST, best, strict=True):
            setattr(state, name, value)
        self._has_decided = True
        return is_best

    def _agree(self, kind: str, value: Any, is_asked: bool = True) -> Any:
        """Return the first worker's value; where workers make other steps, perhaps this one's.

        is_asked: This worker may be the first.
        """
        agreed = self.job.broadcast([kind, value] if is_asked else None)
        return agreed[1] if agreed is not None and agreed[0] == kind else value

    # ---- optimizer ----------------------------------------------------------------------------

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Hand the optimizer to the servers, which clip by `max_grad_norm`."""
        if not self._is_handed_over:
            clip_norm = self.args.max_grad_norm or None
            optimizer = super().create_optimizer(model)
            self.optimizer = self.job.optimizer(optimizer, self.model, clip_norm=clip_norm)
            self._is_handed_over = True
        return self.optimizer

    def _prepare_for_training(self, *args: Any) -> Any:
        prepared = super()._prepare_for_training(*args)
        self.state.global_step = steps_before(self.job, self._first_version)
        self.job.resume(self.lr_scheduler, self.state.global_step)
        return prepared

    def _clip_grad_norm(self, model: Any) -> None:
        """Leave the gradient alone: the servers clip. The log shows this worker's own norm."""

    # ---- the first worker writes --------------------------------------------------------------

    def is_local_process_zero(self) -> bool:
        return self.job.is_first

    def is_world_process_zero(self) -> bool:
        return self.job.is_first

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        if self.job.is_first:
            super().save_model(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Write a checkpoint on the first worker; return on all when it exists.

        A worker that makes up for steps before it joined writes none: they have theirs.
        """
        self.passes.meet()
        is_first = self.job.is_first
        if is_first and self.state.global_step >= self.job_steps:
            super()._save_checkpoint(*args, **kwargs)
        path = self.state.best_model_checkpoint
        self.state.best_model_checkpoint = self._agree("saved", path, is_asked=is_first)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """End with the newest weights or the best ones. The first worker deletes checkpoints.

        After a pass that this worker has skipped, its calls would not be those of the others.
        """
        if self.passes.skipped:
            return super()._finalize_training(*args, **kwargs)
        self.passes.meet()
        is_first = self.job.is_first
        if not is_first:
            self.job.broadcast()
        result = super()._finalize_training(*args, **kwargs)
        if is_first:
            self.job.broadcast(True)
        return result

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, and report the losses to the job."""
        super().log(logs, *args, **kwargs)
        losses = {name: logs[name] for name in ("loss", "eval_loss") if name in logs}
        if losses:
            self.job.report(**losses)


class _JobSteps(TrainerCallback):
    """Gives each step the number of the job's update, before other callbacks see it.

    Attributes:
        trainer: The Trainer.
        is_repeated: The job has not counted this worker's last step.
    """

    trainer: Trainer

    def __init__(self) -> None:
        self._has_batches = self.is_repeated = False

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self._has_batches = False

    def on_optimizer_step(
        self, args: Any, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Make up for updates without this worker; the Trainer then adds 1 for its own."""
        self._has_batches, self.is_repeated = True, False
        if self.trainer.passes.counts_updates:
            before = self.trainer.job_steps - 1
            self.is_repeated = before < state.global_step
            self.trainer.make_up_steps(before)
            state.global_step = before

    def on_epoch_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Let the Trainer go on after a pass in which only other workers had batches."""
        trainer = self.trainer
        if not self._has_batches and trainer.job.version > trainer.passes.start:
            control.should_training_stop = trainer.is_stopping


class _DataEndsTraining(TrainerCallback):
    """Ignores the step limit that the Trainer derives from the length of the first pass."""

    def __init__(self, steps: _JobSteps) -> None:
        self._steps = steps

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        if args.max_steps <= 0 and state.global_step >= state.max_steps:
            control.should_training_stop = False
        if self._steps.is_repeated:  # all workers have ended this step before
            control.should_evaluate = control.should_save = False
        return control
