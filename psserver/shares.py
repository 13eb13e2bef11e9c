"""Queries for the share of a loop that a worker can expect."""

from pscommon.core.stream import Spec
from psserver.core.worker_share import worker_share
from psserver.desk import Desk


class Shares:
    """Reads the coordinator at its desk; nothing is decided, so nothing is written."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def of(self, worker: int, spec: Spec) -> int:
        """Number of batches; see worker_share."""
        return self._desk.step(lambda recorder, now: worker_share(recorder.coordinator, worker, spec), quiet=True)
