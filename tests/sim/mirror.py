"""Standbys of the simulated servers: made at some moment, and told all records from then on;
some tell before that.
"""

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pscommon.core.log_entries import PushKey
from psserver.core.coordinator.machine import CoordinatorMachine

if TYPE_CHECKING:
    from tests.sim.servers import SimShard


@dataclass
class Mirror:
    """What a standby has been told: the whole state, and what came since. shards: how many there
    were at first.

    whole: of the coordinator. lacks: it may not have all that its primary has told others.
    """

    shards: int
    state: str
    staged: list[Any]
    weights: list[float]
    history: list[tuple[PushKey, ...]]
    whole: str = ""
    line: list[tuple[str, Any]] = field(default_factory=list)
    lacks: bool = False

    def tell(self, kind: str, record: Any) -> None:
        """kind: "record" of the shard or "command" of the coordinator."""
        self.line.append((kind, record))

    def told(self, kind: str) -> list[Any]:
        return [record for each, record in self.line if each == kind]

    def fall_behind(self, count: int) -> None:
        """The newest were under way when the primary died, and others knew of them already
        (--shipping async).
        """
        self.lacks = True
        del self.line[max(0, len(self.line) - count) :]


def mirror_of(shard: "SimShard", coordinator: CoordinatorMachine | None) -> Mirror:
    """A standby attaches now. coordinator: of shard 0."""
    machine = shard.machine
    staged = [shard.push_record(machine.staged[key], shard.kept[key]) for key in machine.staged]
    whole = (
        json.dumps(coordinator.complete_state() | {"model": coordinator.model is not None})
        if coordinator is not None
        else ""
    )
    return Mirror(
        shard.shards,
        json.dumps(machine.state()),
        staged,
        list(shard.weights),
        list(shard.history),
        whole,
    )
