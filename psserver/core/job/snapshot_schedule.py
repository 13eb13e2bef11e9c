"""When a snapshot is due, and when one is complete. One at a time; a cut is a log entry, so all
shards cut alike.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class SnapshotInterval:
    """How often: `seconds` or `steps` (versions), or neither: only when asked."""

    seconds: float | None = None
    steps: int | None = None


class PartReport(NamedTuple):
    """One shard's file of a snapshot; problem, when not empty, says why there is none.

    cut: the index of its log entry; a cut that was given up may have been of the same version.
    """

    version: int
    cut: int
    file: str
    nbytes: int
    sha256: str
    problem: str = ""


@dataclass(slots=True)
class SnapshotInProgress:
    """A snapshot under way: the coordinator's own state at that version, and the parts that have
    come.
    """

    version: int
    index: int
    since: float
    state: dict[str, Any]
    parts: dict[int, PartReport] = field(default_factory=dict)

    @property
    def problem(self) -> str:
        """What went wrong, once where it is the same on several shards."""
        found: dict[str, list[int]] = {}
        for shard, part in sorted(self.parts.items()):
            if part.problem:
                found.setdefault(part.problem, []).append(shard)
        return "; ".join(
            f"shard {', '.join(map(str, shards))}: {text}" for text, shards in found.items()
        )


class SnapshotSchedule:
    """Decides on snapshots from versions and time."""

    def __init__(self, every: SnapshotInterval, shards: int) -> None:
        self.every = every
        self.cutting: SnapshotInProgress | None = None
        self.finished: SnapshotInProgress | None = None
        self.shards = shards
        self._last_version = 0
        self._last_time = 0.0

    def started(self, version: int, now: float) -> None:
        """Training starts here (0, or what was restored): this much needs no snapshot."""
        self._last_version, self._last_time = version, now

    @property
    def busy(self) -> bool:
        """One is under way, or complete and not yet taken from `finished` by the shell."""
        return self.cutting is not None or self.finished is not None

    def due_at(self, version: int) -> bool:
        """Is a snapshot of exactly this version wanted? Then no update may come before it."""
        steps = self.every.steps
        return (
            not self.busy and steps is not None and version // steps > self._last_version // steps
        )

    def due(self, version: int, now: float) -> bool:
        """Is it time to cut at this version?"""
        if self.busy or version <= self._last_version:
            return False
        seconds = self.every.seconds
        return self.due_at(version) or (seconds is not None and now - self._last_time >= seconds)

    def age(self, now: float) -> float:
        """Seconds since the newest cut, or since training started."""
        return now - self._last_time

    def filed(self) -> None:
        """The shell has made a snapshot of the finished parts, or could not."""
        self.finished = None

    @property
    def last_version(self) -> int:
        """Of the newest cut, or what training started from."""
        return self._last_version

    def abandon(self) -> None:
        """Whoever was to write the one under way is gone."""
        self.cutting = self.finished = None

    def shard_lost(self, shard: int) -> None:
        """Nobody will write its part any more, unless that is here. Who leaves in a move has
        none.
        """
        if self.cutting is not None and shard < self.shards and shard not in self.cutting.parts:
            self.cutting = None

    def parts(self) -> list[Any] | None:
        """Of the one under way or just finished, JSON-ready: version, index, parts that have
        come; None: there is none.

        `recover` is the way back, but for the coordinator's state in it: whoever takes over
        gives it up anyway.
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
        self._last_version, self._last_time = version, now

    def part(self, shard: int, part: PartReport) -> None:
        """A shard has written, or failed to; repeated and late reports do no harm."""
        if self.cutting is None or (part.version, part.cut) != (
            self.cutting.version,
            self.cutting.index,
        ):
            return
        self.cutting.parts[shard] = part
        if len(self.cutting.parts) == self.shards:
            self.finished, self.cutting = self.cutting, None
