"""The first record of a replication stream: facts about the primary and the job."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from pscommon.core.errors import MismatchError
from pscommon.optim import check_same_optimizers, digest_of_user_defined
from pscommon.snapshot import Manifest
from psserver.durability.state_records import StateRecord, StateRecordKind, about, job_state
from psserver.process.config import ServerConfig
from psserver.process.identity import ServerIdentity


@dataclass(frozen=True, slots=True)
class CoordinatorFacts:
    """What only shard 0 knows of the job.

    generation: number of this start of the job.
    snapshot: the snapshot that the current log continues from; None without one.
    newest: the newest snapshot; None without one.
    shard_count: values of ShardCountFile.
    """

    generation: int
    snapshot: Manifest | None
    newest: Manifest | None
    shard_count: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Hello:
    """What a standby learns first.

    term: the primary's term.
    job: name of the job; empty if unknown.
    coordinator: address of shard 0; empty if unknown.
    standbys: addresses of the standbys, by shard.
    settings: settings that a primary and its standby must share, for JSON.
    optimizers: digest of the user-defined optimizers.
    job_key: the job's key in hexadecimal digits; empty if unknown.
    facts: what only shard 0 sends.
    """

    term: int
    job: str
    coordinator: str
    standbys: Sequence[str]
    settings: Mapping[str, Any]
    optimizers: str
    job_key: str = ""
    facts: CoordinatorFacts | None = None

    def as_json(self) -> dict[str, Any]:
        values = {
            "term": self.term,
            "sync": True,  # earlier releases read it
            "job": self.job,
            "coordinator": self.coordinator,
            "standbys": list(self.standbys),
            "settings": dict(self.settings),
            "optimizers": self.optimizers,
            "job_key": self.job_key,
        }
        if (facts := self.facts) is not None:
            snapshots = [
                each.as_json() if each else None for each in (facts.snapshot, facts.newest)
            ]
            values |= {
                "generation": facts.generation,
                "snapshots": snapshots,
                "layout": dict(facts.shard_count),
            }
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        facts = None
        if "generation" in values:
            snapshot, newest = (
                Manifest.from_json(each) if each else None for each in values["snapshots"]
            )
            facts = CoordinatorFacts(values["generation"], snapshot, newest, values["layout"])
        return cls(
            values["term"],
            values["job"],
            values["coordinator"],
            values["standbys"],
            values["settings"],
            values.get("optimizers", ""),
            values.get("job_key", ""),
            facts,
        )

    def check_settings(self, config: ServerConfig) -> None:
        """Raise MismatchError, with the settings that differ, unless a standby has these."""
        check_same_optimizers("its primary", self.optimizers, "this standby")
        own, theirs = shared_settings(config), self.settings
        differing = [key for key in own if own[key] != theirs.get(key)]
        if differing:
            text = "; ".join(f"{key} ({own[key]}, primary: {theirs.get(key)})" for key in differing)
            raise MismatchError(
                f"the settings of this standby differ from its primary's: {text}", "SHARD_MISMATCH"
            )


def shared_settings(config: ServerConfig) -> dict[str, Any]:
    """Return the settings that a primary and its standby must share, for JSON. Shard 0 decides
    for all.
    """
    return dict(json.loads(json.dumps(config.rules().as_json()))) if config.shard == 0 else {}


def whole_state(
    config: ServerConfig,
    identity: ServerIdentity,
    shard: Iterable[StateRecord],
    facts: CoordinatorFacts | None = None,
    job: Mapping[str, Any] | None = None,
) -> list[StateRecord]:
    """Return the records with which a new standby begins.

    Args:
        shard: The state of the shard.
        facts: What only shard 0 sends.
        job: The state of the coordinator, on shard 0.
    """
    hello = Hello(
        identity.term,
        identity.job,
        identity.coordinator,
        identity.standbys,
        shared_settings(config),
        digest_of_user_defined(),
        identity.worker_keys.job_key.hex(),
        facts,
    )
    return [
        about(StateRecordKind.HELLO, **hello.as_json()),
        *shard,
        *([job_state(job)] if job is not None else []),
        about(StateRecordKind.LOADED),
    ]
