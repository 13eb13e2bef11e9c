"""An Accelerator whose prepared optimizer steps on the job's servers.

    job = psworker.connect()
    accelerator = Accelerator(job=job, clip_norm=1.0)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(
        model, optimizer, train_loader, eval_loader
    )

The first data loader that `prepare` receives together with the optimizer is the training data,
of which this worker gets its share. Every worker iterates over all batches of other loaders.
The first worker is the main process. `wait_for_everyone` and `check_trigger` are collective calls.
"""

from collections.abc import Iterator
from typing import Any

import accelerate
import torch
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import GradientState
from accelerate.utils import send_to_device
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from pscommon.core.errors import InvalidRequestError
from psworker.data.batches import BatchLoader
from psworker.integrations import check_device, refuse_checkpoint, steps_before
from psworker.job import Job


class Accelerator(accelerate.Accelerator):
    """accelerate.Accelerator on a parameter-server job.

    Args:
        job: Result of `psworker.connect`.
        clip_norm: Largest norm of the averaged gradient, clipped by the servers.
        seed: Seed of the order of training batches. None: the job's, as of Job.batches.
        args: Arguments of accelerate.Accelerator.
        kwargs: Keywords of accelerate.Accelerator.

    Raises:
        InvalidRequestError: Several models or optimizers, `load_state`, or another clip norm in
            `clip_grad_norm_`.
    """

    flag_tensor: torch.Tensor | None

    def __init__(
        self,
        *args: Any,
        job: Job,
        clip_norm: float | None = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.job = job
        self._clip_norm, self._seed = clip_norm, seed
        super().__init__(*args, **kwargs)
        check_device(job, self.device, "accelerate")

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare objects as accelerate does; the optimizer and training data become the job's.

        Args:
            args: One model, its optimizer, its training data first among loaders, schedulers.
            device_placement: As in accelerate; not supported together with an optimizer.

        Returns:
            The prepared objects in the same order.
        """
        optimizers = [item for item in args if isinstance(item, torch.optim.Optimizer)]
        if not optimizers:
            return super().prepare(*args, device_placement=device_placement)
        models = [item for item in args if isinstance(item, torch.nn.Module)]
        if len(optimizers) != 1 or len(models) != 1 or device_placement is not None:
            raise InvalidRequestError(
                f"prepare has {len(models)} models and {len(optimizers)} optimizers, but a job has "
                "one of each. Try: one call with both, one ModuleDict for several networks, and no "
                "device_placement"
            )
        models[0].to(self.device)
        server_optimizer = self.job.optimizer(optimizers[0], models[0], clip_norm=self._clip_norm)
        items: list[Any] = [server_optimizer if item is optimizers[0] else item for item in args]
        loaders = [index for index, item in enumerate(items) if isinstance(item, DataLoader)]
        training = loaders[:1]
        shares = [
            TrainingLoader(self.job.batches(items[index], seed=self._seed), self.device)
            for index in training
        ]
        prepared = super().prepare(*(item for i, item in enumerate(items) if i not in training))
        result = list(prepared) if isinstance(prepared, tuple) else [prepared]
        for index, loader in zip(training, shares, strict=True):
            result.insert(index, loader)
        for item in args:
            if isinstance(item, LRScheduler):
                self.job.resume(item, steps_before(self.job))
        return tuple(result)

    def clip_grad_norm_(self, parameters: Any, max_norm: Any, norm_type: int = 2) -> Any:
        """Return the norm of this worker's gradient without changing it: the servers clip."""
        if max_norm not in (self._clip_norm, float("inf")) or norm_type != 2:
            raise InvalidRequestError(
                f"the servers clip by {self._clip_norm}, not by {max_norm} (norm {norm_type}). "
                f"Try: Accelerator(job=job, clip_norm={max_norm}) and the 2-norm"
            )
        return super().clip_grad_norm_(parameters, float("inf"))

    def wait_for_everyone(self) -> None:
        """Wait for all workers, and bring the job's newest weights into the model."""
        self.job.barrier()
        if self._optimizers:
            self.job.pull()

    def check_trigger(self) -> bool:
        """Return whether any worker has called `set_trigger` since; all workers must call this."""
        own = 0.0 if self.flag_tensor is None else float(self.flag_tensor)
        if self.job.all_reduce({"trigger": own})["trigger"] == 0:
            return False
        self.flag_tensor = torch.tensor(0, device=self.device)
        return True

    def load_state(self, input_dir: Any = None, **_: Any) -> None:
        """Raise InvalidRequestError: the servers resume from their own snapshot."""
        refuse_checkpoint(input_dir or "a checkpoint")

    @property
    def is_main_process(self) -> bool:
        return self.job.is_first

    @property
    def is_local_main_process(self) -> bool:
        return self.job.is_first

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the first worker only."""
        if self.job.is_first:
            print(*args, **kwargs)


class TrainingLoader(DataLoaderStateMixin):
    """This worker's share of the training data, with the state that gradient accumulation needs."""

    def __init__(self, batches: BatchLoader, device: torch.device) -> None:
        self._batches = batches
        self._device = device
        self._drop_last = True  # accelerate then leaves `remainder` alone
        self.gradient_state = GradientState()
        self.dataset, self.batch_size = self._batches.dataset, self._batches.batch_size

    @property
    def skipped(self) -> bool:
        """A resumed job has completed the current pass."""
        return self._batches.skipped

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        self.begin()
        try:
            for number, batch in enumerate(self._batches, 1):
                self.end_of_dataloader = number >= len(self._batches)
                yield send_to_device(batch, self._device)
        finally:
            self.end()
