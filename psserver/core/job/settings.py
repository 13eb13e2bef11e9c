"""What the operator decides about a job: the coordinator's settings, as one value."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from psserver.core.job.policy import Policy
from psserver.core.job.snapshot_schedule import SnapshotInterval


@dataclass(frozen=True, slots=True)
class WorkerLossMode:
    """What happens to the place of a worker whose lease has ended.

    shrink: the others go on without it. wait: rounds wait `seconds` for it, or for one that is
    started in its place; then as shrink. abort: the job ends.
    """

    mode: Literal["shrink", "wait", "abort"] = "shrink"
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"wait:{self.seconds:g}" if self.mode == "wait" else self.mode


@dataclass(frozen=True, slots=True)
class JobRules:
    """min_workers: how many the first round waits for; lease: seconds of silence; every: when
    snapshots are due.

    late: what becomes of the data of a gradient that came after its round had closed (see
    Policy.backup). bad_gradients: with NaN or Inf in them, or a norm above max_norm: skip drops
    them, clip puts zeros for what is not finite and scales the norm to max_norm, abort ends the
    job. quarantine_after: so many in a row, and a worker is out. global_batch: samples of one
    update, however many workers there are. progress_timeout: seconds without a call of a
    worker's script after which the worker is dropped; None: never.
    """

    policy: Policy
    min_workers: int = 1
    lease: float = 5.0
    every: SnapshotInterval = field(default_factory=SnapshotInterval)
    on_loss: WorkerLossMode = field(default_factory=WorkerLossMode)
    late: Literal["return", "drop"] = "return"
    bad_gradients: Literal["skip", "abort", "clip"] = "abort"
    max_norm: float | None = None
    quarantine_after: int | None = None
    global_batch: int | None = None
    progress_timeout: float | None = None

    def as_json(self) -> dict[str, Any]:
        """JSON-ready; `from_json` is the way back. What older releases do not know is only there
        when it is set.
        """
        policy, every, on_loss = self.policy, self.every, self.on_loss
        return {
            "policy": {
                "name": policy.name,
                "bound": policy.bound,
                "barrier": policy.barrier,
                "max_staleness": policy.max_staleness,
                "backup": policy.backup,
            },
            "min_workers": self.min_workers,
            "lease": self.lease,
            "every": {"seconds": every.seconds, "steps": every.steps},
            "on_loss": {"mode": on_loss.mode, "seconds": on_loss.seconds},
            "late": self.late,
            "bad_gradients": self.bad_gradients,
            "max_norm": self.max_norm,
            "quarantine_after": self.quarantine_after,
            "global_batch": self.global_batch,
            **(
                {"progress_timeout": self.progress_timeout}
                if self.progress_timeout is not None
                else {}
            ),
        }

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> "JobRules":
        parts = {
            "policy": Policy(**raw["policy"]),
            "every": SnapshotInterval(**raw["every"]),
            "on_loss": WorkerLossMode(**raw["on_loss"]),
        }
        return JobRules(**{**raw, **parts})


@dataclass(frozen=True, slots=True)
class GradientRules:
    """What each shard looks at in its part of a gradient. mends: NaN and Inf become zeros (see
    Rules.bad_gradients). norms: the coordinator wants norms. Shard 0 tells the others: a norm is
    that of all parts."""

    mends: bool = False
    norms: bool = False


ANY = GradientRules()
