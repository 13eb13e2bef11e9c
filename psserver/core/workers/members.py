"""One worker of the job: its state, what was decided about it, what it reported, its step times."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

MAX_STEPS = 5
"""Newest steps that count; their median ignores single slow steps."""

MIN_STEPS = 3
"""Steps that a median needs."""


def median(values: Iterable[float]) -> float:
    """Return the median of at least one number."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return (ordered[half] + ordered[~half]) / 2


class StepTimer:
    """Measures a step from the decision on the push before it until all shards hold its push.

    Attributes:
        started_at: When the current step began; None: not known.
    """

    def __init__(self) -> None:
        self.started_at: float | None = None
        self._latest: deque[float] = deque(maxlen=MAX_STEPS)

    def begin(self, now: float) -> None:
        """Start a step: the worker can compute."""
        self.started_at = now

    def end(self, now: float) -> None:
        """End a step: all shards hold its push. Without a start nothing is measured."""
        if self.started_at is not None:
            self._latest.append(now - self.started_at)
        self.started_at = None

    def discard(self) -> None:
        """Drop the current step: the worker has nothing to compute."""
        self.started_at = None

    def add_pause(self, seconds: float) -> None:
        """Leave out a time for which this process itself was stopped."""
        if self.started_at is not None:
            self.started_at += seconds

    @property
    def median_seconds(self) -> float | None:
        """Median time of a step; None before MIN_STEPS steps."""
        return median(self._latest) if len(self._latest) >= MIN_STEPS else None


class WorkerState(StrEnum):
    """A worker's state in the membership.

    JOINED: It has a lease and has not registered a model; no round waits for it.
    ACTIVE: Rounds wait for it.
    IDLE: It waits for data; rounds and the staleness bound ignore it.
    LOST: Its lease ended, it was quarantined or replaced.
    LEFT: It left.
    PAST: It was a member before the servers returned to a snapshot. It may join again as new.
    """

    JOINED = "joined"
    ACTIVE = "active"
    IDLE = "idle"
    LOST = "lost"
    LEFT = "left"
    PAST = "past"


class WorkerHeartbeat(NamedTuple):
    """What a worker reports of itself.

    Attributes:
        step_seconds: Step time, waiting included.
        phase_seconds: Seconds of all its finished steps by phase.
        no_call_seconds: Time since its script called psworker; 0 while a server has a request of
            it.
    """

    step_seconds: float = 0.0
    samples_per_second: float = 0.0
    phase: str = ""
    no_call_seconds: float = 0.0
    phase_seconds: Mapping[str, float] = {}


NO_HEARTBEAT = WorkerHeartbeat()


@dataclass(slots=True)
class Member:
    """One worker. Times are in seconds by the monotonic clock of this process.

    Attributes:
        ranked: Whether its launcher gave it its rank.
        attempt: How often its launcher had started it before.
        seq: Number of its newest decided push.
        steps: Number of its pushes that counted.
        clock: Steps for the staleness bound.
        staleness: Updates between the weights and the update of its newest push that counted;
            None: none has counted since the servers started.
        bad: Number of its latest pushes in a row with a bad gradient.
        waiting: Number of the loop whose data it waits for.
        missing_since: When its lease ended, while its place is kept for it.
        draining: Whether it was asked to leave.
        ended: Whether it was told that a loop has no more data.
        joined_at: When it joined.
        last_seen: Time of its last request to the coordinator.
        last_moved: When bytes of its pushes or pulls last moved.
        death: Proof that its process has ended; empty: none.
        heartbeat: Its last one.
        step_timer: Its step times as its pushes show them.
    """

    worker: int
    rank: int
    host: str
    pid: int
    device: str
    last_seen: float
    state: WorkerState = WorkerState.JOINED
    ranked: bool = False
    attempt: int = 0
    clock: int = 0
    staleness: int | None = None
    steps: int = 0
    seq: int = 0
    bad: int = 0
    waiting: int | None = None
    reason: str = ""
    missing_since: float | None = None
    draining: bool = False
    ended: bool = False
    joined_at: float = 0.0
    last_moved: float = 0.0
    death: str = ""
    heartbeat: WorkerHeartbeat = NO_HEARTBEAT
    step_timer: StepTimer = field(default_factory=StepTimer)

    @property
    def is_current(self) -> bool:
        """Whether it is a member now."""
        state = self.state  # identity is faster than a search, and every report asks
        return (
            state is WorkerState.ACTIVE or state is WorkerState.IDLE or state is WorkerState.JOINED
        )

    @property
    def is_registered(self) -> bool:
        return self.state in (WorkerState.ACTIVE, WorkerState.IDLE)

    @property
    def is_done(self) -> bool:
        """Whether it took part and left without giving a reason."""
        return self.state is WorkerState.LEFT and not self.reason and (self.steps > 0 or self.ended)

    @property
    def last_contact_at(self) -> float:
        """Time of its last sign of life. Its bytes are one: they can delay its heartbeats."""
        return max(self.last_seen, self.last_moved)

    def __str__(self) -> str:
        process = f"rank {self.rank}, {self.host} pid {self.pid}, step {self.steps}"
        return f"worker {self.worker} ({process})"


SAVED_ATTRIBUTES = (
    "worker",
    "rank",
    "host",
    "pid",
    "device",
    "state",
    "ranked",
    "attempt",
    "clock",
    "steps",
    "seq",
    "bad",
    "waiting",
    "reason",
    "missing_since",
    "draining",
    "ended",
)
"""Attributes in the coordinator's state, where the names are keys on disk. The other ones are
valid only in the process that measured or received them.
"""


def member_to_json(member: Member) -> dict[str, Any]:
    """Return the saved attributes as JSON values for `member_from_json`."""
    return {key: getattr(member, key) for key in SAVED_ATTRIBUTES}


def member_from_json(values: Mapping[str, Any], now: float) -> Member:
    """Return a saved member; its lease begins now."""
    return Member(**{**values, "state": WorkerState(values["state"])}, last_seen=now, joined_at=now)
