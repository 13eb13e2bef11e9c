"""What calls of the Client return."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pscommon.core.errors import PSError

Status = Literal["applied", "duplicate", "stale", "rejected", "none"]


@dataclass(frozen=True, slots=True)
class PushResult:
    """How a push ended, alike on all shards.

    Attributes:
        status: "applied": it counted, once. "duplicate": an earlier call that failed before its
            answer had sent this push, and that one counted. "stale": the policy found it too old,
            or the worker lost its place in the job (reason FENCED or DRAINED; after a failed
            connection such a push may have counted). "rejected": a server refused it. "none": the
            call had no push.
        version: Updates in the weights that came with it or are on the servers, the smallest over
            the shards.
        staleness: Updates between the version of the gradient and this push.
        reason: Empty, or a reason and a text: "NON_FINITE: worker 3 (...): tensor conv1.weight".
        seconds: "push" (sending), "wait" (for the decision), "apply" (the optimizer) and "pull"
            (receiving), on the slowest shard.
    """

    status: Status
    version: int
    staleness: int = 0
    reason: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def lost(self) -> bool:
        """True if its worker lost its place in the job."""
        return self.status == "stale" and self.reason.partition(":")[0] in ("FENCED", "DRAINED")


def lost(error: PSError, version: int) -> PushResult:
    """Of a push whose worker has lost its place in the job, for this reason."""
    return PushResult("stale", version, reason=f"{error.reason}: {error}")


@dataclass(frozen=True, slots=True)
class Lease:
    """Batches of a loop that are this worker's to compute on.

    numbers: for LoopSpec.indices. end: no more will come in this loop. sat_out: rounds went on
    without this worker while it waited, so its weights are old: pull before computing, or before
    testing at the loop's end. following: for each number, how many of those after it belong to
    the same push; empty: each is one of its own. share: in the answer to the first request of a
    loop, the number of its batches that this worker can expect.
    """

    numbers: tuple[int, ...] = ()
    end: bool = False
    sat_out: bool = False
    following: tuple[int, ...] = ()
    share: int = 0
