"""Write records to the log on disk, to the standby, to both, or to neither."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Protocol

from pscommon.tracing.recorder import Pushes, server_spans
from pscommon.wal.log import Record
from psserver.durability.best_effort_log import BestEffortLog, Raw
from psserver.parameters.store import ParameterStore
from psserver.process.config import ServerConfig


class RecordSource(IntEnum):
    """Subject of a record.

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
    def has_standby(self) -> bool: ...
    @property
    def term(self) -> int:
        """Term of this server as its shard's primary; each failover increments it."""

    @property
    def address(self) -> str:
        """Address of the standby; empty without a standby."""

    @property
    def state(self) -> str:
        """State of the standby, for the status: none, loading or in sync."""

    @property
    def unacknowledged(self) -> int:
        """Number of records that the standby has not acknowledged."""

    def send(
        self, source: RecordSource, kind: int, header: bytes, payload: Sequence[memoryview]
    ) -> tuple[int, int]:
        """Queue a record. Return the position to pass to `wait_for_standby`."""

    @property
    def last_position(self) -> tuple[int, int]:
        """Position of the newest record, for `wait_for_standby`."""

    def wait_for_standby(self, sent: tuple[int, int]) -> None:
        """Wait until the record's results may become visible.

        Never returns if this server is no longer the primary.
        """

    def reset(self, why: str) -> None:
        """Make the standby reload the whole state. Never returns if the standby becomes primary."""

    def send_checksum(self, version: int, store: ParameterStore) -> None:
        """Send a checksum of the arrays at this version. Must not run during an update."""

    def announce_snapshot(self, manifest: str) -> None:
        """Announce a new snapshot; wait until the standby has recorded it. Called like `send`."""


class RecordSink:
    """Destination of one component's records. Write failures are not raised.

    source: the component.
    log: the log on disk; None without one.
    line: the connection to a standby; None if there can be no standby.
    """

    source: RecordSource

    def __init__(self, log: BestEffortLog | None = None, line: StandbyLink | None = None) -> None:
        self._log, self._line = log, line

    @property
    def is_idle(self) -> bool:
        """Whether records currently have no destination."""
        return self._log is None and (self._line is None or not self._line.has_standby)

    def send_checksum(self, version: int, store: ParameterStore) -> None:
        """Send the standby a checksum of the arrays at this version."""
        if self._line is not None:
            self._line.send_checksum(version, store)

    @property
    def nbytes(self) -> int:
        """Bytes on disk since the last snapshot began."""
        return self._log.nbytes if self._log is not None else 0

    @property
    def is_broken(self) -> bool:
        """Whether some record since the last snapshot could not be written."""
        return self._log is not None and self._log.is_broken

    def append(
        self,
        kind: int,
        header: bytes,
        payload: Sequence[memoryview] = (),
        settled: bool = True,
        pushes: Pushes = (),
    ) -> None:
        """Write a record to disk, and send it to the standby at the same time.

        settled: also wait until its results may become visible.
        pushes: The push that the record has, for its spans.
        """
        sent = (
            self._line.send(self.source, kind, header, payload)
            if self._line is not None
            else (0, 0)
        )
        if self._log is not None:
            began = server_spans.now()
            self._log.append(kind, header, payload)
            server_spans.add("log", began, pushes)
        if settled:
            self._wait_for_standby(sent, pushes)

    def wait_for_standby(self) -> None:
        """Wait until the results of all records so far may become visible."""
        if self._line is not None:
            self._wait_for_standby(self._line.last_position)

    def _wait_for_standby(self, sent: tuple[int, int], pushes: Pushes = ()) -> None:
        if self._line is None:
            return
        has_standby, began = self._line.has_standby, server_spans.now()
        self._line.wait_for_standby(sent)
        if has_standby:
            server_spans.add("standby", began, pushes)

    def begin_records(self, version: int, records: Iterable[Raw]) -> None:
        """Begin a segment on disk. The standby needs none."""
        if self._log is not None:
            self._log.begin_segment(version, records)

    def read_records(self, version: int | None) -> Iterator[Record]:
        """Yield the records since a snapshot was cut; None: since the job began.

        Raises:
            LogDamagedError: A segment is damaged.
            OSError: A segment cannot be read, or there is no log on disk.
        """
        if self._log is None:
            raise FileNotFoundError("this server keeps no log")
        return self._log.records_since(version)

    def remove_before(self, version: int) -> None:
        """Remove segments older than this version, of which a complete snapshot exists."""
        if self._log is not None:
            self._log.remove_before(version)

    def reset_standby(self, why: str) -> None:
        """Make the standby reload the whole state."""
        if self._line is not None:
            self._line.reset(why)

    def clear(self) -> None:
        """Remove all segments; the caller begins another one next."""
        self.reset_standby("the job goes on from another state")
        if self._log is not None:
            self._log.clear()

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


def disk_log(
    config: ServerConfig, name: str, on_failure: Callable[[str], None]
) -> BestEffortLog | None:
    """Open the log of these settings; None if they ask for none.

    on_failure: called with the name of the errno.
    """
    if config.durability != "log" or config.data_dir is None:
        return None
    return BestEffortLog(config.data_dir / name, config.log_fsync, on_failure)
