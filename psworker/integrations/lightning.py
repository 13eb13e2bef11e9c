"""A Lightning strategy that trains on the job's servers.

    job = psworker.connect()
    trainer = Trainer(strategy=ParameterServerStrategy(job), max_epochs=3)
    trainer.fit(module, train_loader, validation_loader)

The module stays as it is. `batch_size` is per worker; `gradient_clip_val` clips the averaged
gradient, as with DDP. Every worker evaluates the complete validation set. The first worker writes
checkpoints and logs.
"""

from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn

from pscommon.core.errors import InvalidRequestError
from psworker.integrations import refuse_checkpoint, steps_before
from psworker.job import Job


class ParameterServerStrategy(SingleDeviceStrategy):
    """Runs the optimizer on the job's servers and takes training batches from the job.

    Args:
        job: Result of `psworker.connect`.
        seed: Seed of the order of training batches. None: the job's, as of Job.batches.
        kwargs: Keywords of lightning's SingleDeviceStrategy (precision_plugin, checkpoint_io ...).

    Raises:
        InvalidRequestError: Several optimizers, clipping by value, resume from a checkpoint.
    """

    strategy_name = "parameter_server"
    optimizers: list[Any]

    def __init__(self, job: Job, seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(device=job.device, **kwargs)
        self.job = job
        self._seed = seed
        self._trainer: Trainer | None = None

    @property
    def is_global_zero(self) -> bool:
        return self.job.is_first

    def setup_environment(self) -> None:
        super().setup_environment()
        rank_zero_only.rank = 0 if self.job.is_first else 1

    def setup(self, trainer: Trainer) -> None:
        self._trainer = trainer
        super().setup(trainer)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Hand the module's optimizer to the servers."""
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise InvalidRequestError(
                f"configure_optimizers returned {len(self.optimizers)} optimizers, but a job has "
                "one. Try: one optimizer with a parameter group for each network"
            )
        if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
            raise InvalidRequestError(
                "cannot clip by value: servers clip by norm. Try: gradient_clip_algorithm='norm', "
                "or clip in the module's on_before_optimizer_step"
            )
        clip_norm, trainer.gradient_clip_val = trainer.gradient_clip_val, None
        self.optimizers = [
            self.job.optimizer(self.optimizers[0], self.model, clip_norm=clip_norm or None)
        ]
        for config in self.lr_scheduler_configs:
            if config.interval == "step":  # Lightning repeats the steps of each epoch
                self.job.resume(config.scheduler, steps_before(self.job) // config.frequency)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return this worker's share of training data, and evaluation data unchanged."""
        if self._trainer is None or not self._trainer.training:
            return dataloader
        return self.job.batches(dataloader, seed=self._seed)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint for evaluation; for training, servers resume from a snapshot."""
        if self._trainer is None or self._trainer.state.fn == TrainerFn.FITTING:
            refuse_checkpoint(checkpoint_path)
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        return checkpoint
