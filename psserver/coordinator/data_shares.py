"""Queries for the share of a loop that a worker can expect."""

from pscommon.core.data_stream import Spec
from psserver.coordinator.executor import CommandExecutor
from psserver.core.commands.worker_share import worker_share


class DataShares:
    """Reads the coordinator's machine through the executor; it changes nothing, so nothing is
    recorded.
    """

    def __init__(self, executor: CommandExecutor) -> None:
        self._executor = executor

    def of(self, worker: int, spec: Spec) -> int:
        """Return the number of batches that the worker can expect (see worker_share)."""
        return self._executor.step(
            lambda recorder, now: worker_share(recorder.coordinator, worker, spec), quiet=True
        )
