"""Write records to the log on disk, to the standby, to both, or nowhere."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Protocol

from pscommon.wal.log import Record
from psserver.durability.best_effort_log import BestEffortLog, Raw
from psserver.parameters.store import ParameterStore
from psserver.process.config import ServerConfig


class RecordSource(IntEnum):
    """What a record is about.

    LINE: the replication stream itself.
    SHARD: the shard (shard_log.py).
    JOB: the job (coordinator_log.py).
    """

    LINE = 0
    SHARD = 1
    JOB = 2


class StandbyLink(Protocol):
    """The connection to a standby, if there is one."""

    @property
    def open(self) -> bool: ...

    @property
    def term(self) -> int:
        """The term of this server as its shard's primary."""
        ...

    @property
    def address(self) -> str:
        """The standby's address; empty without a standby."""
        ...

    @property
    def state(self) -> str:
        """The standby's state for the status: none, loading or in sync."""
        ...

    @property
    def behind(self) -> int:
        """Number of records that the standby has not acknowledged."""
        ...

    def send(
        self, source: RecordSource, kind: int, header: bytes, payload: Sequence[memoryview]
    ) -> tuple[int, int]:
        """Queue a record. Return the position to pass to `settle`."""
        ...

    @property
    def last(self) -> tuple[int, int]:
        """The position of the newest record, for `settle`."""
        ...

    def settle(self, sent: tuple[int, int]) -> None:
        """Return when the record's results may become visible; never if this server is no longer
        primary.
        """
        ...

    def drop(self, why: str) -> None:
        """Make the standby load the whole state again. Never returns if it becomes primary."""
        ...

    def checksum(self, version: int, store: ParameterStore) -> None:
        """Send a checksum of the arrays at this version. Called while nothing is applied."""
        ...

    def snapshot(self, manifest: str) -> None:
        """Tell the standby of a new snapshot; return when it knows. Called like `send`."""
        ...


class RecordSink:
    """Where one component's records go.

    log: None if nothing is written to disk.
    line: None if there can be no standby.
    """

    def __init__(
        self,
        source: RecordSource,
        log: BestEffortLog | None = None,
        line: StandbyLink | None = None,
    ) -> None:
        self._source, self._log, self._line = source, log, line

    @property
    def idle(self) -> bool:
        """Whether records currently go nowhere."""
        return self._log is None and (self._line is None or not self._line.open)

    def checksum(self, version: int, store: ParameterStore) -> None:
        """Send the standby a checksum of the arrays at this version."""
        if self._line is not None:
            self._line.checksum(version, store)

    @property
    def nbytes(self) -> int:
        """Bytes on disk since the last snapshot was begun."""
        return self._log.nbytes if self._log is not None else 0

    @property
    def broken(self) -> bool:
        """Whether something since the last snapshot could not be written."""
        return self._log is not None and self._log.broken

    def append(
        self, kind: int, header: bytes, payload: Sequence[memoryview] = (), settled: bool = True
    ) -> None:
        """Write a record to disk, and send it to the standby at the same time.

        settled: also wait until its results may become visible.
        """
        sent = (
            self._line.send(self._source, kind, header, payload)
            if self._line is not None
            else (0, 0)
        )
        if self._log is not None:
            self._log.append(kind, header, payload)
        if self._line is not None and settled:
            self._line.settle(sent)

    def settle(self) -> None:
        """Return when the results of all records so far may become visible."""
        if self._line is not None:
            self._line.settle(self._line.last)

    def begin(self, version: int, records: Iterable[Raw]) -> None:
        """Begin a segment on disk. The standby needs none."""
        if self._log is not None:
            self._log.begin(version, records)

    def since(self, version: int | None) -> Iterator[Record]:
        """Yield records as BestEffortLog.since; raises FileNotFoundError without a log."""
        if self._log is None:
            raise FileNotFoundError("this server keeps no log")
        return self._log.since(version)

    def retire(self, version: int) -> None:
        """Remove segments from before this version: a complete snapshot of it exists."""
        if self._log is not None:
            self._log.retire(version)

    def void(self, why: str) -> None:
        """Make the standby load the whole state again."""
        if self._line is not None:
            self._line.drop(why)

    def clear(self) -> None:
        """Remove all segments; `begin` comes next."""
        self.void("the job goes on from another state")
        if self._log is not None:
            self._log.clear()

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


def disk_log(
    config: ServerConfig, name: str, on_failure: Callable[[str], None]
) -> BestEffortLog | None:
    """Open the log that these settings ask for; None without one.

    on_failure: called with the name of the errno.
    """
    if config.durability != "log" or config.data_dir is None:
        return None
    return BestEffortLog(config.data_dir / name, config.log_fsync, on_failure)
