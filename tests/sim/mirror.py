"""Standbys of the simulated servers, in sync with them: made at some moment, and told all records from then on."""

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pscommon.core.log import PushKey
from psserver.core.coordinator import Coordinator

if TYPE_CHECKING:
    from tests.sim.servers import SimShard


@dataclass
class Mirror:
    """What a standby has been told: the whole state, and the records since. shards: how many there were at first.

    whole, commands: of the coordinator.
    """

    shards: int
    state: str
    staged: list[Any]
    weights: list[float]
    history: list[tuple[PushKey, ...]]
    whole: str = ""
    records: list[Any] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)


def mirror_of(shard: "SimShard", coordinator: Coordinator | None) -> Mirror:
    """A standby attaches now. coordinator: of shard 0."""
    machine = shard.machine
    staged = [shard.push_record(machine.staged[key], shard.kept[key]) for key in machine.staged]
    whole = json.dumps(coordinator.whole()) if coordinator is not None else ""
    return Mirror(shard.shards, json.dumps(machine.state()), staged, list(shard.weights), list(shard.history), whole)
