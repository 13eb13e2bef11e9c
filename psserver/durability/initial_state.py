"""How shard 0 begins a log of the job: the state of the coordinator and of its own shard."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from pscommon.snapshot import Manifest
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.durability.shard_state import ShardState


class Origin(Enum):
    """Where an initial state comes from.

    FRESH: a new job.
    SNAPSHOT: a snapshot; all workers join as new.
    LOG: the write-ahead logs of this server, which go on.
    PROMOTION: what this server replicated as a standby.
    """

    FRESH = "fresh"
    SNAPSHOT = "snapshot"
    LOG = "log"
    PROMOTION = "promotion"


@dataclass(frozen=True, slots=True)
class InitialState:
    """The state with which shard 0 begins.

    origin: where it comes from.
    coordinator: the coordinator's machine.
    shard: the state of this server's own shard. None: it loads `snapshot`, as the other shards
        do, or is installed already (PROMOTION).
    snapshot: the snapshot that the log continues from; None without one.
    newest: the newest snapshot; None without one.
    job: name of the job, as stored with the state; empty if unknown.
    """

    origin: Origin
    coordinator: CoordinatorMachine
    shard: ShardState | None = None
    snapshot: Manifest | None = None
    newest: Manifest | None = None
    job: str = ""

    @property
    def is_recovered(self) -> bool:
        """Whether another process began the log."""
        return self.origin in (Origin.LOG, Origin.PROMOTION)

    def first_record(self, shards: int, generation: int, job: str) -> dict[str, Any]:
        """Return what the coordinator's log begins with, for JSON.

        Args:
            shards: Number of shards.
            generation: Number of this start of the job.
            job: Name of the job.
        """
        coordinator = self.coordinator
        state = (
            coordinator.complete_state()
            if self.origin is not Origin.FRESH
            else {
                "epoch": coordinator.log_id,
                "version": 0,
                "generation": generation,
                "policy": [*coordinator.job.policy_row()],
                "rules": coordinator.job.rules.as_json(),
                **coordinator.job.trainings.as_json(),
                **coordinator.reported.state(),
            }
        )
        return {"shards": shards, **state, "job": job}
