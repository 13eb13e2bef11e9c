"""Passes of a framework whose steps are the job's updates."""

import math
from collections.abc import Iterator
from itertools import chain
from typing import Any

from psworker.job import Job

END = object()
"""Item that follows the last one of a pass."""


class TrainingPasses:
    """A framework's training data: passes over this worker's share, and meetings of all workers.

    Under sync a framework's step has the number of the job's update. So all workers evaluate, save
    and stop at the same update, also a worker that had no batch for it: `items` yields `UPDATES`
    there. It yields `UPDATES` first, too, and a worker that joins during a pass makes up for the
    updates since its beginning: collective calls inside a pass are numbered in their order.

    Attributes:
        dataset: The data set.
        batch_size: Samples per batch and worker.
        start: The job's version at the beginning of the current pass.
    """

    def __init__(self, job: Job, data: Any, seed: Any) -> None:
        self.job = job
        self._batches = job.batches(data, seed=seed)
        self._batches.marks_updates = True
        self.dataset, self.batch_size = self._batches.dataset, self._batches.batch_size
        self._rounds: int | None = None
        self.start = 0

    @property
    def counts_updates(self) -> bool:
        """Whether each step of a worker is an update of the job."""
        return self.job.policy in ("sync", "allreduce", "local")

    @property
    def skipped(self) -> bool:
        """The job has completed the current pass without this worker."""
        return self._batches.skipped

    @property
    def share(self) -> int:
        """Batches of the current pass that this worker can expect; TypeError for a stream."""
        return len(self._batches)

    def __len__(self) -> int:
        """Return the largest share of a worker in the current pass; before it, in the first one.

        All workers must make the first call. TypeError for a stream.
        """
        share = self.share
        if self._rounds is None:
            self._agree(share)
        assert self._rounds is not None
        return self._rounds

    def __iter__(self) -> Iterator[Any]:
        """Begin the next pass; return its batches and `UPDATES`."""
        items = iter(self._batches)
        first = next(items, END)
        if not self.skipped:
            self.agree_on_pass()
        return items if first is END else chain((first,), items)

    def agree_on_pass(self) -> None:
        """Take length and first version of the current pass from all workers."""
        try:
            share = self.share
        except TypeError:
            share = 0
        self._agree(share)

    def _agree(self, share: int) -> None:
        values = self.job.all_reduce({"share": share, "version": self.job.version})
        self._rounds = math.ceil(values["share"] - 1e-6)  # shares differ by at most one
        self.start = round(values["version"])

    def meet(self) -> None:
        """Wait for all workers, and bring the job's newest weights into the model."""
        self._batches.release()
        self.job.barrier()
        self.job.pull()
