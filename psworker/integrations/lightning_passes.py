"""The training loader of Lightning's loops: equally many batches on all workers."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch

from pscommon.core.errors import InvalidRequestError
from psworker.data.batches import UPDATES
from psworker.integrations.training_passes import END, TrainingPasses
from psworker.job import Job

MAX_STREAM_BATCHES = 2**40
"""Length of a stream. Without a length Lightning would fetch each batch before the last step."""

NONE_WARNING = "train_dataloader yielded None. If this was on purpose, ignore this warning..."


class LightningPasses(TrainingPasses):
    """The training loader of Lightning's loops.

    Under sync `trainer.global_step` has the job's count of updates before each batch.

    callbacks: Callbacks whose state a worker that joins takes from the others.
    """

    def __init__(
        self, job: Job, data: Any, seed: Any, trainer: Any, callbacks: Sequence[Any]
    ) -> None:
        super().__init__(job, data, seed)
        self._trainer = trainer
        self._callbacks = callbacks
        self._pending: Iterator[Any] | None = None
        self._is_new = True
        self._share = self._goal = 0
        loop = trainer.fit_loop.epoch_loop
        loop._warning_cache.add(NONE_WARNING)
        is_automatic = trainer.lightning_module.automatic_optimization
        self._batches_per_step = trainer.accumulate_grad_batches if is_automatic else 1
        self._steps_per_batch = len(trainer.strategy.optimizers)
        self._steps = (
            loop.automatic_optimization.optim_progress.optimizer.step.total
            if is_automatic
            else loop.manual_optimization.optim_step_progress.total
        )

    def __len__(self) -> int:
        try:
            return super().__len__()
        except TypeError:
            return MAX_STREAM_BATCHES

    def skip_completed(self, schedulers: Any) -> None:
        """Let Lightning begin after the passes that the job has completed."""
        limit, completed = self._trainer.max_epochs, 0
        while limit in (None, -1) or completed < limit:
            self._pending = super().__iter__()
            if not self.skipped:
                break
            self._pending, completed = None, completed + 1
        if self.counts_updates:
            self._count(self.job.version)
        progress = self._trainer.fit_loop.epoch_progress
        for each in (progress.total, progress.current):
            each.ready = each.started = each.processed = each.completed = completed
        for config in schedulers:
            if config.interval == "epoch" and not config.reduce_on_plateau and completed:
                self.job.resume(config.scheduler, completed // config.frequency)

    @property
    def is_behind(self) -> bool:
        """Whether Lightning repeats steps that the job has made without this worker."""
        return self.counts_updates and self._steps.completed < self._goal

    def meet(self) -> None:
        """Meet, and count the updates until then."""
        super().meet()
        if self.counts_updates and not self.is_behind:
            self._count(self.job.version)

    def _count(self, steps: int) -> None:
        self._steps.ready = self._steps.completed = steps

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of a pass, which begins with the first one."""
        items, self._pending = self._pending or super().__iter__(), None
        if self.skipped:  # it ended before this worker came to it: repeat its collective calls
            self.agree_on_pass()
        length, given, used = self._begin(), 0, 0
        last_step = (length - 1) // self._batches_per_step * self._batches_per_step
        item: Any = UPDATES
        while given < length and item is not END:
            for _ in islice(self._missed_steps(), length - given):
                given += 1
                yield None
            # a step needs a batch of this worker at its end
            if given >= last_step and 0 < self._share - used < length - given:
                given += 1
                yield None
                continue
            item = next(items, END) if given < length else END
            if item is not UPDATES and item is not END:
                given, used = given + 1, used + 1
                yield item
        while given < length < MAX_STREAM_BATCHES:
            given += 1
            yield None
        if length == MAX_STREAM_BATCHES:  # the last batch is known when it is over
            fetcher = self._trainer.fit_loop._data_fetcher
            fetcher.length = fetcher.fetched + 1
            yield None

    def _begin(self) -> int:
        """Tell Lightning the length of the pass; return it."""
        trainer = self._trainer
        length: int = len(self)
        self._share = self.share if length < MAX_STREAM_BATCHES else 0
        is_stream = length == MAX_STREAM_BATCHES
        limit, interval = trainer.limit_train_batches, trainer.val_check_interval
        if isinstance(limit, int):
            length = min(length, limit)
        elif not is_stream:
            length = int(length * limit)
        trainer.fit_loop.max_batches = float("inf") if length == MAX_STREAM_BATCHES else length
        trainer.fit_loop._data_fetcher.length = length
        if isinstance(interval, float):
            if is_stream and interval != 1.0:
                raise InvalidRequestError(
                    f"val_check_interval={interval} needs the length of a pass, which a stream "
                    "does not have. Try: a number of batches"
                )
            trainer.val_check_batch = (
                float("inf") if length == MAX_STREAM_BATCHES else max(1, int(length * interval))
            )
        if self.counts_updates:
            self._count(self.start)  # also if this worker comes later
        self._share_callbacks()
        return length

    def _missed_steps(self) -> Iterator[int]:
        """Count the steps that the job has made without this worker, batch by batch."""
        if not self.counts_updates:
            return
        before, self._goal = self._steps.completed, self.job.version
        steps = self._goal - before
        for batch in range(1, 1 + steps * self._batches_per_step // self._steps_per_batch):
            self._count(before + batch * self._steps_per_batch // self._batches_per_step)
            yield self._steps.completed
        self._count(self._goal)

    def _share_callbacks(self) -> None:
        """Give a worker that joins the best metric and the patience of the others."""
        is_asked = not (self._is_new and self.job.first_version)
        states = [_as_json(callback.state_dict()) for callback in self._callbacks]
        shared = self.job.broadcast(states if is_asked else None)
        if not is_asked and shared is not None:
            for callback, state in zip(self._callbacks, shared, strict=True):
                callback.load_state_dict(_from_json(state))
        self._is_new = False


def _as_json(value: Any) -> Any:
    """Return a state as JSON; a tensor of one element becomes {"tensor": NUMBER}."""
    if isinstance(value, torch.Tensor):
        return {"tensor": float(value)}
    if isinstance(value, dict):
        return {"items": [[_as_json(key), _as_json(each)] for key, each in value.items()]}
    return value


def _from_json(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return torch.tensor(value["tensor"])
    return {_from_json(key): _from_json(each) for key, each in value["items"]}
