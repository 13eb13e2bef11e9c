"""Results of client calls."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pscommon.core.errors import PSError

Status = Literal["applied", "duplicate", "stale", "rejected", "none"]


class StepProgress(NamedTuple):
    """What a worker tells the status about its steps.

    Attributes:
        steps: Number of finished steps.
        step_seconds, samples_per_second: Duration and throughput of the last step.
        phase: "compute", "push", "pull", "data" or "idle".
        phase_seconds: Seconds of all finished steps by phase.
    """

    steps: int = 0
    step_seconds: float = 0.0
    samples_per_second: float = 0.0
    phase: str = ""
    phase_seconds: Mapping[str, float] = {}


@dataclass(frozen=True, slots=True)
class PushResult:
    """Outcome of a push, equal on all shards.

    Values of `status`:

    - "applied": the push counted once.
    - "duplicate": an earlier call sent this push, failed before the answer, and its push counted.
    - "stale": the policy found the push too old, or the worker lost its membership (reason FENCED
      or DRAINED). After a failed connection a push with a lost membership may have counted.
    - "rejected": a server refused the push.
    - "none": the call had no push.

    Attributes:
        status: Outcome, one of the values above.
        version: Version of the pulled weights, else of the servers; the smallest over the shards.
        staleness: Number of updates between the gradient's version and this push.
        reason: Empty, or a reason and a text: "NON_FINITE: worker 3 (...): tensor conv1.weight".
        seconds: Seconds by phase on the slowest shard: "push" (sending), "wait" (for the
            decision), "apply" (the optimizer) and "pull" (receiving).
    """

    status: Status
    version: int
    staleness: int = 0
    reason: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def lost(self) -> bool:
        """True if the worker lost its membership."""
        return self.status == "stale" and self.reason.partition(":")[0] in ("FENCED", "DRAINED")


def lost(error: PSError, version: int) -> PushResult:
    """Return the outcome of a push whose worker has lost its membership with this error."""
    return PushResult("stale", version, reason=f"{error.reason}: {error}")


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """What this worker passes to a collective call.

    Attributes:
        kind: "barrier", "all_reduce" or "broadcast".
        values: Numbers of an all_reduce, by name.
        samples: Their weight.
        text: JSON value of a broadcast; "null": none.
    """

    kind: str
    values: Mapping[str, float] = field(default_factory=dict)
    samples: int = 1
    text: str = "null"


@dataclass(frozen=True, slots=True)
class CollectiveResult:
    """Result of a collective call, equal on all workers.

    Attributes:
        values: Means of an all_reduce, by name.
        text: JSON value of a broadcast.
        version: Version of the servers' weights.
    """

    values: Mapping[str, float]
    text: str
    version: int


@dataclass(frozen=True, slots=True)
class ReduceAnswer:
    """What workers do together under policy allreduce.

    Attributes:
        kind: "none": this worker has the newest weights. "download": the servers have them.
            "gradients": reduce gradients. "weights": `source` sends its weights to the others.
            "upload": `source` sends them to the servers.
        number: Number of the round.
        group: Number of the process group.
        workers, samples: The workers of the group, in order, and the weights of their gradients.
        source: Number of a worker.
        address: HOST:PORT of the first worker's store.
        groups_json: Hyper-parameters that count for all.
        is_partial: A worker has tensors without a gradient.
    """

    kind: str
    number: int = 0
    group: int = 0
    workers: tuple[int, ...] = ()
    samples: tuple[int, ...] = ()
    source: int = 0
    address: str = ""
    groups_json: str = ""
    is_partial: bool = False


@dataclass(slots=True)
class StoredState:
    """Weights and optimizer state of the servers.

    Attributes:
        version: Their version.
        states: The bytes of each optimizer state, in place of the whole flat buffer.
        groups_json: Hyper-parameters of the groups.
        steps: Steps of each tensor.
        scalars: State with one number per tensor, by name and index of the tensor.
    """

    version: int
    states: dict[str, bytearray] = field(default_factory=dict)
    groups_json: str = ""
    steps: dict[int, int] = field(default_factory=dict)
    scalars: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Lease:
    """Batches of a loop that this worker has leased.

    Attributes:
        numbers: Numbers of the batches, for LoopSpec.indices.
        end: The loop has no more batches.
        sat_out: Rounds went on without this worker while it waited, so its weights are old. Pull
            before computing, and before testing at the loop's end.
        following: For each number, how many later batches belong to the same push; empty: each
            batch is a push by itself.
        share: Number of the loop's batches that this worker can expect; set in the answer to the
            first request of a loop.
        loop, first_epoch: The job's number of the pass, and the first epoch of its shuffle. None:
            as in the request.
    """

    numbers: tuple[int, ...] = ()
    end: bool = False
    sat_out: bool = False
    following: tuple[int, ...] = ()
    share: int = 0
    loop: int | None = None
    first_epoch: int | None = None
