"""Where records go before anybody learns what came of them: to the disk's log, to the standby,
to both, or nowhere.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Protocol

from pscommon.wal.log import Record
from psserver.durability.best_effort_log import BestEffortLog, Raw
from psserver.parameters.store import ParameterStore
from psserver.process.config import ServerConfig


class RecordSource(IntEnum):
    """What a record is about: the line itself, the shard (shard_log.py), or the job
    (job_journal.py).
    """

    LINE = 0
    SHARD = 1
    JOB = 2


class StandbyLink(Protocol):
    """To a standby, if there is one now."""

    @property
    def open(self) -> bool: ...

    @property
    def term(self) -> int:
        """Of this server as its shard's primary."""
        ...

    @property
    def address(self) -> str:
        """Of the standby; empty where there is none."""
        ...

    @property
    def state(self) -> str:
        """Of the standby, for people: none, loading or in sync."""
        ...

    @property
    def behind(self) -> int:
        """Records that are on their way to it."""
        ...

    def send(
        self, source: RecordSource, kind: int, header: bytes, payload: Sequence[memoryview]
    ) -> tuple[int, int]:
        """A record is on its way; what `settle` wants to know."""
        ...

    @property
    def last(self) -> tuple[int, int]:
        """What `settle` wants to know of the newest record."""
        ...

    def settle(self, sent: tuple[int, int]) -> None:
        """Returns when what came of the record may be told; never, where this process is not
        primary any more.
        """
        ...

    def drop(self, why: str) -> None:
        """What the standby has is void: it is to load everything anew. Never returns where it is
        to be primary.
        """
        ...

    def checksum(self, version: int, store: ParameterStore) -> None:
        """The standby is to compare its numbers at this version. Called while nothing is
        applied.
        """
        ...

    def snapshot(self, manifest: str) -> None:
        """There is a new snapshot of the job. Returns when the standby knows it. Called as
        `send`.
        """
        ...


class RecordSink:
    """One history. log: None where nothing is written down; line: None where there can be no
    standby.
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
        """Nobody wants records now."""
        return self._log is None and (self._line is None or not self._line.open)

    def checksum(self, version: int, store: ParameterStore) -> None:
        """These are the numbers at this version."""
        if self._line is not None:
            self._line.checksum(version, store)

    @property
    def nbytes(self) -> int:
        """On the disk since the last snapshot was begun."""
        return self._log.nbytes if self._log is not None else 0

    @property
    def broken(self) -> bool:
        """Something since then could not be written."""
        return self._log is not None and self._log.broken

    def append(
        self, kind: int, header: bytes, payload: Sequence[memoryview] = (), settled: bool = True
    ) -> None:
        """Returns when it is written down, and (settled) when what comes of it may be told. On
        its way to the standby meanwhile."""
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
        """Returns when what came of all records so far may be told."""
        if self._line is not None:
            self._line.settle(self._line.last)

    def begin(self, version: int, records: Iterable[Raw]) -> None:
        """A new segment on the disk. A standby needs none: it goes on."""
        if self._log is not None:
            self._log.begin(version, records)

    def since(self, version: int | None) -> Iterator[Record]:
        """As BestEffortLog.since; FileNotFoundError where there is no log."""
        if self._log is None:
            raise FileNotFoundError("this server keeps no log")
        return self._log.since(version)

    def retire(self, version: int) -> None:
        """There is a snapshot of this version."""
        if self._log is not None:
            self._log.retire(version)

    def void(self, why: str) -> None:
        """A standby cannot go on from the records that it has."""
        if self._line is not None:
            self._line.drop(why)

    def clear(self) -> None:
        """The history is over; `begin` comes next."""
        self.void("the job goes on from another state")
        if self._log is not None:
            self._log.clear()

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


def disk_log(
    config: ServerConfig, name: str, on_failure: Callable[[str], None]
) -> BestEffortLog | None:
    """Where a server with these settings writes things down; None: it does not. on_failure: told
    what went wrong.
    """
    if config.durability != "log" or config.data_dir is None:
        return None
    return BestEffortLog(config.data_dir / name, config.log_fsync, on_failure)
