"""Snapshot schedule: when a snapshot is due, and when it is complete.

At most one snapshot is in progress. Its cut is a log entry, so all shards cut at the same version.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class SnapshotInterval:
    """Interval of automatic snapshots; with neither field set, snapshots are made on request only.

    seconds: maximum time between snapshots, in seconds.
    steps: number of versions between snapshots.
    """

    seconds: float | None = None
    steps: int | None = None


class PartReport(NamedTuple):
    """One shard's part of a snapshot.

    version: version of the snapshot.
    cut: index of its Cut entry; an abandoned cut may have had the same version.
    file: name of the file; empty if there is none.
    nbytes: size of the file.
    sha256: SHA-256 of the file, in hex.
    problem: why there is no file; empty if there is one.
    """

    version: int
    cut: int
    file: str
    nbytes: int
    sha256: str
    problem: str = ""


@dataclass(slots=True)
class SnapshotInProgress:
    """A snapshot that some shards have not written yet.

    version: version of the snapshot.
    index: index of its Cut entry.
    since: when it began, in seconds of the coordinator's clock.
    state: the coordinator's state at that version.
    parts: part reports so far, by shard.
    """

    version: int
    index: int
    since: float
    state: dict[str, Any]
    parts: dict[int, PartReport] = field(default_factory=dict)

    @property
    def problem(self) -> str:
        """All problems of the parts; equal ones of several shards are merged."""
        found: dict[str, list[int]] = {}
        for shard, part in sorted(self.parts.items()):
            if part.problem:
                found.setdefault(part.problem, []).append(shard)
        return "; ".join(
            f"shard {', '.join(map(str, shards))}: {text}" for text, shards in found.items()
        )


class SnapshotSchedule:
    """Decides when to cut snapshots, from versions and time.

    every: the interval.
    shards: number of shards.
    cutting: the snapshot in progress.
    finished: a complete snapshot whose manifest is not written yet.
    last_version: version of the newest cut, or the version that training started from.
    """

    def __init__(self, every: SnapshotInterval, shards: int) -> None:
        self.every = every
        self.cutting: SnapshotInProgress | None = None
        self.finished: SnapshotInProgress | None = None
        self.shards = shards
        self.last_version = 0
        self._last_time = 0.0

    def started(self, version: int, now: float) -> None:
        """Record that training starts at this version (0 or restored), which needs no snapshot."""
        self.last_version, self._last_time = version, now

    @property
    def busy(self) -> bool:
        """Whether a snapshot is in progress, or complete without a manifest."""
        return self.cutting is not None or self.finished is not None

    def due_at(self, version: int) -> bool:
        """Return whether a snapshot of exactly this version is due, before any further update."""
        steps = self.every.steps
        return steps is not None and version // steps > self.last_version // steps and not self.busy

    def due(self, version: int, now: float) -> bool:
        """Return whether a snapshot should be cut at this version now."""
        if version <= self.last_version:
            return False
        seconds = self.every.seconds
        is_late = seconds is not None and now - self._last_time >= seconds
        return self.due_at(version) or (is_late and not self.busy)

    def age(self, now: float) -> float:
        """Return the seconds since the newest cut, or since training started."""
        return now - self._last_time

    def abandon(self) -> None:
        """Abandon the snapshot: the process that would write the manifest was replaced."""
        self.cutting = self.finished = None

    def shard_lost(self, shard: int) -> None:
        """Abandon the snapshot if a lost shard has not reported its part.

        A shard that a reshard removes has no part.
        """
        if self.cutting is not None and shard < self.shards and shard not in self.cutting.parts:
            self.cutting = None

    def parts(self) -> list[Any] | None:
        """Return version, index and part reports of the current snapshot, JSON-ready, or None.

        `recover` is the inverse, except for the coordinator's state: a new primary abandons the
        snapshot anyway.
        """
        under_way = self.cutting or self.finished
        if under_way is None:
            return None
        return [
            under_way.version,
            under_way.index,
            [[shard, *part] for shard, part in under_way.parts.items()],
        ]

    def recover(self, version: int, parts: list[Any] | None, now: float) -> None:
        self.started(version, now)
        if parts is not None:
            self.begin(parts[0], parts[1], now, {})
            for shard, *part in parts[2]:
                self.part(shard, PartReport(*part))

    def begin(self, version: int, index: int, now: float, state: dict[str, Any]) -> None:
        self.cutting = SnapshotInProgress(version, index, now, state)
        self.last_version, self._last_time = version, now

    def part(self, shard: int, part: PartReport) -> None:
        """Record a shard's part or its failure. Repeated and late reports have no effect."""
        if self.cutting is None or (part.version, part.cut) != (
            self.cutting.version,
            self.cutting.index,
        ):
            return
        self.cutting.parts[shard] = part
        if len(self.cutting.parts) == self.shards:
            self.finished, self.cutting = self.cutting, None
