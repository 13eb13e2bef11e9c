"""The operator's settings for a job."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from psserver.core.job.policy import Policy
from psserver.core.job.snapshot_schedule import SnapshotInterval


@dataclass(frozen=True, slots=True)
class WorkerLossMode:
    """What happens when a worker's lease expires.

    mode: shrink: the other workers continue without it. wait: rounds wait `seconds` for it or for a
        replacement, then continue without it. abort: the job ends.
    seconds: duration of the wait, in seconds.
    """

    mode: Literal["shrink", "wait", "abort"] = "shrink"
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"wait:{self.seconds:g}" if self.mode == "wait" else self.mode


@dataclass(frozen=True, slots=True)
class JobRules:
    """The coordinator's rules.

    policy: when pushes become an update.
    min_workers: workers required before training starts.
    lease: seconds without contact after which a worker is lost.
    every: when snapshots are due.
    on_loss: what happens when a worker is lost.
    bad_gradients: what happens to a gradient with NaN or Inf, or with a norm above max_norm. skip:
        drop it. clip: replace NaN and Inf by zeros, and scale the norm to max_norm. abort: end
        the job.
    max_norm: maximum L2 norm of a gradient; None: any norm.
    quarantine_after: consecutive bad gradients after which a worker is removed; None: never.
    global_batch: samples of one update, for any number of workers; None: one batch of each worker.
    progress_timeout: seconds without a call of a worker's script after which the worker is dropped;
        None: never.
    late: what becomes of the batches of a push that missed its round (see Policy.backup). Jobs
        return them to the ledger. A log of an earlier release may say drop, and is replayed so.
    """

    policy: Policy
    min_workers: int = 1
    lease: float = 5.0
    every: SnapshotInterval = field(default_factory=SnapshotInterval)
    on_loss: WorkerLossMode = field(default_factory=WorkerLossMode)
    bad_gradients: Literal["skip", "abort", "clip"] = "abort"
    max_norm: float | None = None
    quarantine_after: int | None = None
    global_batch: int | None = None
    progress_timeout: float | None = None
    late: Literal["return", "drop"] = "return"

    def as_json(self) -> dict[str, Any]:
        """Return the rules, JSON-ready; `from_json` is the inverse.

        A field that older releases do not know is present only if it is set.
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
    """What each shard does with its part of a gradient. Shard 0 distributes these rules.

    mends: replace NaN and Inf by zeros (see JobRules.bad_gradients).
    norms: report the sum of squares; the norm of a gradient needs those of all shards.
    """

    mends: bool = False
    norms: bool = False


ANY = GradientRules()
