"""A transformers Trainer whose optimizer steps happen on the job's servers.

    job = psworker.connect()
    trainer = Trainer(model=model, args=args, train_dataset=data, job=job)
    trainer.train()

Arguments keep their meaning. `per_device_train_batch_size` is per worker; `max_grad_norm` clips the
averaged gradient, as with DDP. Every worker evaluates the complete evaluation set. The first worker
writes checkpoints and logs.
"""

import sys
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import torch
import transformers
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState

from psworker.integrations import check_device, refuse_checkpoint, steps_before
from psworker.job import Job


class Trainer(transformers.Trainer):
    """transformers.Trainer on a parameter-server job.

    Args:
        job: Result of `psworker.connect`.
        args: Arguments of transformers.Trainer.
        kwargs: Keywords of transformers.Trainer.

    Raises:
        InvalidRequestError: Resume from a checkpoint folder, or a device that is not the job's.
    """

    def __init__(self, *args: Any, job: Job, **kwargs: Any) -> None:
        self.job = job
        self._is_handed_over = False
        super().__init__(*args, **kwargs)
        check_device(job, self.args.device, "transformers")
        self.add_callback(_DataEndsTraining())

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train; a resumed job continues from its servers' snapshot."""
        refuse_checkpoint(resume_from_checkpoint)
        return super().train(None, *args, **kwargs)

    # ---- data ---------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """Return the loader of this worker's share; each epoch is one pass over it."""
        self.create_optimizer()  # the job shares a pass among registered workers
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return self.job.batches(super().get_train_dataloader().base_dataloader, seed=seed)

    def _run_epoch(self, **epoch: Any) -> None:
        """Train until the job's ledger ends the pass; lost workers change its length."""
        loader = epoch["train_dataloader"]
        batches: Iterator[Any] = iter(loader)
        first = list(islice(batches, 1))
        if loader.skipped:  # a resumed job has completed this pass
            self.state.epoch = epoch["epoch"] + 1
            return
        epoch["train_dataloader"] = chain(first, batches)
        epoch["num_update_steps_per_epoch"] = sys.maxsize
        super()._run_epoch(**epoch)

    def get_batch_samples(self, *args: Any) -> Any:
        """Return the batches of a step; if there are none, the pass ends."""
        samples, items = super().get_batch_samples(*args)
        if not samples:
            self.control.should_epoch_stop = True
        return samples, items

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
        self.state.global_step = steps_before(self.job)
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
        if self.job.is_first:
            super()._save_checkpoint(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, and report the losses to the job."""
        super().log(logs, *args, **kwargs)
        losses = {name: logs[name] for name in ("loss", "eval_loss") if name in logs}
        if losses:
            self.job.report(**losses)


class _DataEndsTraining(TrainerCallback):
    """Ignores the step limit that the Trainer derives from a share of the data at the start."""

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        if args.max_steps <= 0 and state.global_step >= state.max_steps:
            control.should_training_stop = False
        return control
