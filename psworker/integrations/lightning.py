"""A Lightning strategy that trains on the job's servers.

    job = psworker.connect()
    trainer = Trainer(strategy=ParameterServerStrategy(job), max_epochs=3)
    trainer.fit(module, train_loader, validation_loader)

The module stays as it is. `batch_size` is per worker; `gradient_clip_val` clips the averaged
gradient, as with DDP. Every worker evaluates the complete validation set with the same weights,
and takes the metrics of the first worker. Only that one writes checkpoints and logs.

During `fit` all workers make the same collective calls: Lightning's and those of its callbacks.
So every worker goes through equally many batches in a pass. One that has no batch for an update,
or joins during a pass, goes through None instead, which Lightning does not train on.
"""

from os import PathLike, fspath
from typing import Any, cast

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BackboneFinetuning, Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.states import TrainerFn

from pscommon.core.errors import InvalidRequestError
from psworker.integrations import refuse_checkpoint, steps_before
from psworker.integrations.lightning_passes import LightningPasses
from psworker.job import Job


class ParameterServerStrategy(SingleDeviceStrategy):
    """Runs the optimizers on the job's servers and takes training batches from the job.

    Args:
        job: Result of `psworker.connect`.
        seed: Seed of the order of training batches. None: the job's, as of Job.batches.
        kwargs: Keywords of lightning's SingleDeviceStrategy (precision_plugin, checkpoint_io ...).

    Raises:
        InvalidRequestError: Parameters that come later, several training loaders, clipping by
            value, resume from a checkpoint.
    """

    strategy_name = "parameter_server"
    optimizers: list[Any]

    def __init__(self, job: Job, seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(device=job.device, **kwargs)
        self.job = job
        self._seed = seed
        self._passes: LightningPasses | None = None
        self._is_in_training_step = False

    # ---- ranks ----------------------------------------------------------------------------------

    @property
    def is_global_zero(self) -> bool:
        return self.job.is_first

    @property
    def global_rank(self) -> int:
        """0 on the first worker only."""
        return 0 if self.job.is_first else max(1, self.job.rank)

    @global_rank.setter
    def global_rank(self, rank: int) -> None:  # SingleDeviceStrategy sets 0
        pass

    def setup_environment(self) -> None:
        super().setup_environment()
        rank_zero_only.rank = self.global_rank

    # ---- model and data --------------------------------------------------------------------------

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Hand the module's optimizers to the servers."""
        super().setup_optimizers(trainer)
        if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
            raise InvalidRequestError(
                "cannot clip by value: servers clip by norm. Try: gradient_clip_algorithm='norm', "
                "or clip in the module's on_before_optimizer_step"
            )
        if any(isinstance(callback, BackboneFinetuning) for callback in _callbacks(trainer)):
            raise InvalidRequestError(
                "BackboneFinetuning adds parameters to the optimizer later, but those of a job are "
                "fixed. Try: all parameters in configure_optimizers, and switch requires_grad in a "
                "callback"
            )
        clip_norm, trainer.gradient_clip_val = trainer.gradient_clip_val or None, None
        model = cast(LightningModule, self.model)
        if len(self.optimizers) == 1:
            named = [self.job.optimizer(self.optimizers[0], model, clip_norm=clip_norm)]
        else:
            named = [
                self.job.optimizer(each, model, clip_norm=clip_norm, name=f"optimizer{number}")
                for number, each in enumerate(self.optimizers)
            ]
            self.job.pull()  # registers the model
        self.optimizers = named
        for config in self.lr_scheduler_configs:
            if config.interval == "step":  # Lightning repeats the steps of each epoch
                steps = steps_before(self.job) // len(named)
                self.job.resume(config.scheduler, steps // config.frequency)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return this worker's share of training data, and evaluation data unchanged."""
        trainer = self._fitting
        if trainer is None or not trainer.training:
            return dataloader
        if self._passes is not None and not trainer.reload_dataloaders_every_n_epochs:
            raise InvalidRequestError(
                "cannot train on several data loaders: a job's pass goes over one. Try: one "
                "DataLoader over torch.utils.data.StackDataset or ConcatDataset"
            )
        stateful = [
            callback
            for callback in _callbacks(trainer)
            if isinstance(callback, EarlyStopping | ModelCheckpoint)
        ]
        self._passes = LightningPasses(self.job, dataloader, self._seed, trainer, stateful)
        return self._passes

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint for evaluation; for training, servers resume from a snapshot."""
        if self._fitting is not None:
            refuse_checkpoint(checkpoint_path)
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        return checkpoint

    @property
    def _fitting(self) -> Trainer | None:
        """The trainer, if `fit` is its current or last function: then all workers meet."""
        module = self.lightning_module
        trainer = None if module is None else module._trainer
        return trainer if trainer is not None and trainer.state.fn == TrainerFn.FITTING else None

    # ---- meetings --------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        trainer._logger_connector.__class__ = _OneResult

    def on_train_start(self) -> None:
        """Skip the passes that a resumed job has completed."""
        super().on_train_start()
        if self._passes is not None:
            self._passes.skip_completed(self.lr_scheduler_configs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._is_in_training_step = True
        try:
            return super().training_step(*args, **kwargs)
        finally:
            self._is_in_training_step = False

    def on_validation_start(self) -> None:
        """Let all workers validate the same, newest weights."""
        super().on_validation_start()
        trainer = self._fitting
        if trainer is not None and not trainer.sanity_checking and self._passes is not None:
            self._passes.meet()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the newest weights: all workers make a checkpoint, and the first one writes it."""
        if self._fitting is not None and self._passes is not None:
            self._passes.meet()
        state: dict[str, Any] = super().lightning_module_state_dict()
        return state

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if self._passes is None or not self._passes.is_behind:
            super().save_checkpoint(*args, **kwargs)

    def on_train_end(self) -> None:
        """Take the newest weights, and the paths of the first worker's checkpoints."""
        super().on_train_end()
        if self._passes is None or self._passes.skipped:
            return  # its calls would not be those of the others
        self._passes.meet()
        for callback in _callbacks(cast(Trainer, self._fitting)):
            if isinstance(callback, ModelCheckpoint):
                paths = callback.best_model_path, callback.last_model_path
                callback.best_model_path, callback.last_model_path = self.broadcast(paths)

    def barrier(self, name: str | None = None) -> None:
        if self._fitting is not None:
            self.job.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the first worker's object, a JSON value or a path."""
        if self._fitting is None:
            return obj
        return self.job.broadcast([fspath(obj) if isinstance(obj, PathLike) else obj])[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean or sum of one number over all workers; inside a training step its own.

        Each worker evaluates all data, so of evaluations the sum is the mean over workers, too,
        and another reduction the first worker's value. Not every worker makes every training step.
        """
        trainer = self._fitting
        if trainer is None or self._is_in_training_step:
            return tensor
        operation = str(reduce_op).rpartition(".")[2].lower()
        if operation in ("mean", "avg", "sum"):
            mean = self.job.all_reduce({"value": tensor})["value"]
            result = mean * self.job.workers if operation == "sum" and trainer.training else mean
        else:
            result = self.broadcast(float(tensor))
        if isinstance(tensor, torch.Tensor):
            return torch.full_like(tensor, result)
        return result

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self._fitting is None:
            return decision
        share = self.job.all_reduce({"decision": float(decision)})["decision"]
        return share > 1 - 1e-9 if all else share > 0


class _OneResult(_LoggerConnector):
    """Gives the callbacks of all workers the first worker's validation metrics."""

    agreed: dict[str, torch.Tensor] | None = None

    def on_epoch_end(self) -> None:
        super().on_epoch_end()
        trainer = self.trainer
        if trainer.state.fn == TrainerFn.FITTING and trainer.validating:
            own = self.metrics["callback"]
            first = trainer.strategy.broadcast({name: float(own[name]) for name in own})
            self.agreed = {name: torch.tensor(value) for name, value in first.items()}

    @property
    def callback_metrics(self) -> Any:
        metrics = super().callback_metrics
        if self.trainer.state.fn == TrainerFn.FITTING:
            metrics.update(self.agreed or {})
        return metrics


def _callbacks(trainer: Trainer) -> list[Callback]:
    return cast(list[Callback], trainer.callbacks)
