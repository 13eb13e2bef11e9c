"""The state of a job that the parts of its coordinator share, and its JSON form.

The keys of the JSON form are names on disk.
"""

from collections.abc import Mapping
from typing import Any

from pscommon.core.data_stream import Spec
from pscommon.core.errors import PSError, out_of_the_job
from pscommon.core.limits import ALLREDUCE
from pscommon.core.log_entries import ShardReport
from pscommon.core.model_spec import ModelSpec
from psserver.core.data.data_ledger import DataLedger
from psserver.core.data.map_loop import units_of
from psserver.core.job.entry_log import EntryLog
from psserver.core.job.pending_pushes import PendingPushes
from psserver.core.job.reduction import Reduction
from psserver.core.job.reshard_phase import ReshardPhase
from psserver.core.job.settings import JobRules
from psserver.core.job.snapshot_schedule import SnapshotSchedule
from psserver.core.job.trainings import Trainings
from psserver.core.workers.collectives import Collectives
from psserver.core.workers.members import Member
from psserver.core.workers.membership import Membership
from psserver.core.workers.reported_values import ReportedValues


class JobState:
    """Everything that the coordinator has decided, and the reports that it decides on.

    Attributes:
        shards: Number of shards; during a reshard: after it.
        log_id: Id of this log; reports on another log are ignored.
        version: Number of updates.
        updates: Number of updates of each optimizer; empty if the job has one without a name.
        samples: Number of samples in all updates. Of several optimizers the first one counts: each
            of them goes through all samples.
        counts: Number of decided pushes by outcome.
        gradient_norms: By optimizer, where the job computes it, the norm of its newest update's
            gradient before clipping: that of the average with a clip norm, otherwise with
            --max-norm the greatest one of a push. It is not saved.
        begun: Whether every shard has weights.
        started: Whether --min-workers workers have registered once.
        workers_wanted: Number of workers that it wants; None: as many as come.
        failure: Why the job has to end.
        model: The model; None before a worker registers one.
        seed: The seed that the first worker gave which registered, unsigned 64 bits.
        uploading_worker: Number of the worker that uploads the initial weights.
        reshard: The reshard in progress.
        reshard_index: Index of the newest Reshard.
        is_reshard_saved: The snapshot that this state continues from ends `reshard`.
        followers: Shards that follow this log.
        evicted: Workers with an Evict entry.
        is_resumed: The servers were restarted, and no worker has asked since.
        trainings: The names of its trainings.

    Args:
        generation: Number of starts of the job's servers: no worker number is given twice.
        log_id: Id of the log; None: the generation.
    """

    def __init__(
        self, shards: int, rules: JobRules, generation: int = 0, log_id: int | None = None
    ) -> None:
        self.shards = shards
        self.rules = rules
        self.log_id = generation if log_id is None else log_id
        self.policy = rules.policy
        self.min_workers = rules.min_workers
        self.membership = Membership(rules.lease, generation)
        self.membership.leases.progress_timeout = rules.progress_timeout
        self.ledger = DataLedger()
        self.log = EntryLog(shards)
        self.pending = PendingPushes(shards)
        self.cuts = SnapshotSchedule(rules.every, shards)
        self.reported = ReportedValues()
        self.collectives = Collectives()
        self.reduction = Reduction(generation)
        self.reshard: ReshardPhase | None = None
        self.reshard_index = 0
        self.is_reshard_saved = False
        self.model: ModelSpec | None = None
        self.uploading_worker: int | None = None
        self.workers_wanted: int | None = None
        self.failure: PSError | None = None
        self.begun = self.started = self.is_resumed = False
        self.version = self.samples = self.seed = 0
        self.updates: dict[str, int] = {}
        self.counts = {"applied": 0, "stale": 0, "rejected": 0}
        self.gradient_norms: dict[str, float] = {}
        self.evicted: set[int] = set()
        self.followers: set[int] = set()
        self.trainings = Trainings()

    def fail(self, error: PSError) -> None:
        self.failure = self.failure or error

    def member(self, worker: int, now: float) -> Member:
        """Return the worker of a request and renew its lease.

        Raises:
            FencedError: The worker is not a member any more.
        """
        member = self.membership.members.get(worker)
        if member is None or not member.is_current:
            raise out_of_the_job(
                worker, member.reason if member else "it is not a worker of this job"
            )
        member.last_seen = now
        return member

    def has_started(self) -> bool:
        """Return whether training has started: the first round waits for --min-workers."""
        self.started = self.started or (
            self.begun and len(self.membership.registered()) >= self.min_workers
        )
        return self.started

    @property
    def is_stalled(self) -> bool:
        """Whether every registered worker waits for data or in a collective call."""
        return self.membership.index.active_clocks.count == 0

    @property
    def has_newest_weights(self) -> bool:
        """Whether the servers have the weights of this version, not the workers alone."""
        return self.policy.name != ALLREDUCE or self.reduction.uploaded == self.version

    @property
    def waits_for_cut(self) -> bool:
        """Whether a snapshot of this version comes before the next update.

        Of weights that only the workers have there is none: a later one takes its place.
        """
        return self.cuts.due_at(self.version) and self.has_newest_weights

    @property
    def uploader(self) -> Member | None:
        """The worker that uploads the initial weights."""
        return self.membership.members.get(self.uploading_worker or 0)

    @property
    def expected_workers(self) -> int:
        """Number of workers that would join again after a rollback."""
        return len(self.membership.registered()) if self.started else self.min_workers

    def count_update(self, optimizer: str) -> None:
        """Count an update of an optimizer."""
        self.version += 1
        if optimizer:
            self.updates[optimizer] = self.updates.get(optimizer, 0) + 1

    @property
    def has_one_optimizer(self) -> bool:
        return self.model is None or not isinstance(self.model.optimizer, Mapping)

    def counts_samples(self, optimizer: str) -> bool:
        """Return whether `samples` counts the pushes of this optimizer."""
        return not optimizer or self.model is None or optimizer == min(self.model.optimizers)

    def clip_norm(self, optimizer: str) -> float | None:
        """Return the clip norm of an optimizer's updates."""
        settings = self.model.optimizer if self.model is not None else None
        if isinstance(settings, Mapping):
            settings = settings[optimizer]
        return settings.clip_norm if settings is not None else None

    def units(self, spec: Spec) -> int | None:
        """Return the number of batches of an update; None: one of each worker."""
        return units_of(self.rules.global_batch, spec) if self.policy.barrier else None

    def policy_settings(self) -> tuple[str, int | None, int | None, int]:
        """Return the arguments of `policy` for the current policy."""
        policy = self.policy
        return (
            policy.name,
            policy.bound if policy.name == "ssp" else None,
            policy.max_staleness,
            policy.backup,
        )

    # ---- shards ----------------------------------------------------------------------------------

    @property
    def following_shards(self) -> int:
        """Number of shards that follow the log."""
        return self.reshard.members if self.reshard is not None else self.shards

    def is_of_shard_count(self, report: ShardReport) -> bool:
        """Return whether a report's pushes have the current partition."""
        return report.shard < self.shards and report.index >= self.reshard_index

    def set_shard_count(self, shards: int, index: int) -> None:
        """Set the number of shards and drop all pending pushes: they have the old partition."""
        self.shards = self.cuts.shards = shards
        self.reshard_index = index
        self.pending.clear(shards)

    # ---- saved and loaded ------------------------------------------------------------------------

    def as_json(self) -> dict[str, Any]:
        """Return all decisions as JSON values. Reports of shards and workers are not included."""
        return {
            "epoch": self.log_id,
            "shards": self.shards,
            "layout_index": self.reshard_index,
            "move": self.reshard.state() if self.reshard is not None else None,
            "version": self.version,
            "index": self.log.index,
            "digest": self.log.digest,
            "samples": self.samples,
            **({"seed": self.seed} if self.seed else {}),
            **({"updates": dict(self.updates)} if self.updates else {}),
            "counts": dict(self.counts),
            "policy": [*self.policy_settings()],
            "rules": self.rules.as_json(),
            "started": self.started,
            "min_workers": self.min_workers,
            **({"workers_wanted": self.workers_wanted} if self.workers_wanted else {}),
            "cutting": self.cuts.busy,
            "last_cut": self.cuts.last_version,
            "resumed": self.is_resumed,
            **self.trainings.as_json(),
            **({"extendable": True} if self.ledger.extendable else {}),
            **self.reported.state(),
            **self.collectives.state(),
            "registered": len(self.membership.registered()),
            "pushes": {str(m.worker): m.seq for m in self.membership},
            "evicted": sorted(self.evicted),
            "followers": sorted(self.followers),
            "roster": self.membership.state(),
            "pending": self.pending.state(),
            "loops": self.ledger.state(),
            **self.ledger.places.as_json(),
        }

    def load_numbers(self, state: Mapping[str, Any], model: ModelSpec | None) -> None:
        """Load the numbers that a snapshot and a complete state both have."""
        self.model, self.begun = model, True
        self.version, self.samples = state["version"], state["samples"]
        self.reduction.uploaded = self.version
        self.seed = state.get("seed", 0)
        self.updates = dict(state.get("updates", {}))
        self.workers_wanted = state.get("workers_wanted")
        self.counts = dict(state["counts"])
        self.trainings = Trainings.from_json(state)
        self.log.start(state["index"])
