"""What calls of the Client return."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["applied", "duplicate", "stale", "rejected", "none"]


@dataclass(frozen=True, slots=True)
class PushResult:
    """How a push ended, alike on all shards.

    status: "applied": it counted, once, however often it had to be sent. "duplicate": an earlier call, which failed
    before it got an answer, had sent this very push, and that one counted; this call changed nothing. "stale": the
    policy found it too old. "rejected": a server found it unfit. "none": the call had no push.
    version: applied updates in the weights that came with it (or on the servers), the smallest over the shards.
    staleness: updates that were applied between the version of the gradient and this push.
    reason: empty, or a REASON of pscommon.core.errors and a text: "NON_FINITE: worker 3 (...): tensor conv1.weight".
    seconds: "push" (sending), "wait" (for the policy's decision), "apply" (the optimizer) and "pull" (receiving), on
    the shard that took longest.
    """

    status: Status
    version: int
    staleness: int = 0
    reason: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Lease:
    """Batches of a loop that are this worker's to compute on.

    numbers: for LoopSpec.indices. end: no more will come in this loop. sat_out: rounds went on without this worker
    while it waited, so its weights are old: pull before computing, or before testing at the loop's end.
    """

    numbers: tuple[int, ...] = ()
    end: bool = False
    sat_out: bool = False
