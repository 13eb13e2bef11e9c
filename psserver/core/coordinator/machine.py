"""The coordinator: it runs on shard 0, decides, and writes the job's log.

Theory of operation. One process orders all decisions; every shard carries them out in that order
(a replicated state machine with a single leader). A gradient counts on all shards or on none,
because an Apply is written only after every shard has reported the push (the voting phase of a
two-phase commit).

States of a job: no weights, weights but fewer than --min-workers workers, training, resharding,
failed. States of a worker: see workers/members.py.

Events: workers join, register, push, ask for data, and leave. Shards report what they have
staged. Leases end. An operator changes the policy or the number of shards, or asks for a
snapshot.

Decisions are log entries: Begin, Apply, SetBuffers, Reject, Evict, Measure, Cut, Reshard.

Parts. Each part decides on one kind of event and works on the shared JobState:

- push_reports.py: reports of shards.
- update_rounds.py: which ready pushes make the next update.
- participation.py: which members rounds wait for.
- registration.py: workers come and go.
- data_requests.py: batches for workers.
- collective_calls.py: small values that workers combine.
- reduce_rounds.py: which workers reduce their gradients among themselves (policy allreduce).
- resharding.py: a change of the number of shards.

A command (psserver/core/commands) calls one of the parts.

Invariants:

- The batches of a push are committed with its Apply, so data and weights always agree.
- A request never blocks. One that cannot be answered yet gets None, and the caller repeats it
  after a change.
- Requests may be repeated without effect.
- The state depends only on the commands and their order. Time is an argument of each command. A
  coordinator is therefore recovered by replaying its commands (commands/recorder.py).
"""

from collections.abc import Mapping
from typing import Any

from pscommon.core.log_entries import Cut
from pscommon.core.model_spec import ModelSpec
from psserver.core.coordinator.collective_calls import CollectiveCalls
from psserver.core.coordinator.data_requests import DataRequests
from psserver.core.coordinator.participation import Participation
from psserver.core.coordinator.push_reports import PushReports
from psserver.core.coordinator.reduce_rounds import ReduceRounds
from psserver.core.coordinator.registration import Registration
from psserver.core.coordinator.resharding import Resharding
from psserver.core.coordinator.update_rounds import UpdateRounds
from psserver.core.job.job_state import JobState
from psserver.core.job.policy import Policy, policy
from psserver.core.job.reshard_phase import ReshardPhase
from psserver.core.job.settings import JobRules
from psserver.core.workers.members import StepTimer


class CoordinatorMachine:
    """The machine; the text of the module describes it, JobState the arguments.

    Attributes:
        job: The state that the parts share. Its main machines are attributes here, too.
    """

    def __init__(
        self, shards: int, rules: JobRules, generation: int = 0, log_id: int | None = None
    ) -> None:
        self.job = job = JobState(shards, rules, generation, log_id)
        self.membership, self.ledger, self.log = job.membership, job.ledger, job.log
        self.pending, self.cuts, self.reported = job.pending, job.cuts, job.reported
        self.participation = Participation(job)
        self.rounds = UpdateRounds(job, self.participation)
        self.reports = PushReports(job, self.rounds, self.participation)
        self.registration = Registration(job, self.rounds)
        self.data = DataRequests(job, self.rounds, self.participation)
        self.collectives = CollectiveCalls(job, self.rounds, self.participation)
        self.reduction = ReduceRounds(job, self.rounds, self.participation)
        self.resharding = Resharding(job, self.rounds)

    # ---- settings --------------------------------------------------------------------------------

    def set_policy(self, policy: Policy, now: float) -> None:
        """Change the policy from the next update on. All registered workers get one clock."""
        self.job.policy = policy
        highest = max((member.clock for member in self.membership.registered()), default=0)
        for member in self.membership.registered():
            self.membership.index.set_clock(member, highest)
        self.rounds.advance(now)

    def use_rules(self, rules: JobRules, now: float) -> None:
        """Use the operator's settings after a restart of the servers, and clear a failure.

        A policy that a command set stays unless the settings name another one than before.
        """
        job, leases = self.job, self.membership.leases
        before, job.rules, job.failure = job.rules, rules, None
        job.pending.ready.look_again()
        leases.seconds, leases.progress_timeout = rules.lease, rules.progress_timeout
        self.cuts.every = rules.every
        if rules.min_workers != before.min_workers:
            job.min_workers = rules.min_workers
        if rules.policy != before.policy:
            self.set_policy(rules.policy, now)

    # ---- snapshots and recovery ------------------------------------------------------------------

    def cut(self, now: float) -> bool:
        """Append a Cut of the current version.

        Return False while another snapshot is written, and while the servers lack this version's
        weights (policy allreduce).
        """
        job, cuts = self.job, self.cuts
        if not job.begun or cuts.busy or (job.reshard is not None and not job.reshard.complete):
            return False
        job.reduction.is_cut_wanted = not job.has_newest_weights
        if job.reduction.is_cut_wanted:
            return False
        job.log.append(Cut(job.log.next, job.version))
        cuts.begin(job.version, job.log.index, now, {})
        assert cuts.cutting is not None
        cuts.cutting.state = job.as_json()
        return True

    def complete_state(self) -> dict[str, Any]:
        """Return `JobState.as_json` with the entries that some shard may need, for `load_state`."""
        job = self.job
        return job.as_json() | {
            "begun": job.begun,
            "uploader": job.uploading_worker,
            "log": job.log.state(),
            "cut": job.cuts.parts(),
        }

    def restore(
        self,
        state: Mapping[str, Any],
        model: ModelSpec,
        now: float,
        before: "CoordinatorMachine | None" = None,
    ) -> None:
        """Continue from a snapshot. All workers join as new, and uncommitted batches are free.

        Args:
            state: The coordinator's state in the snapshot.
            model: The model.
            now: The time.
            before: The coordinator before a rollback: its policy and the number of workers that it
                wants stay, and no more workers than its own are expected. None: the job was not
                running; the snapshot's policy stays unless the settings name another one than
                then.
        """
        job = self.job
        job.load_numbers(state, model)
        job.is_resumed = True
        expected = before.job.expected_workers if before is not None else job.min_workers
        # where all workers had left, as at the end of a run, a new run begins
        if not state["registered"]:
            job.workers_wanted = None
        job.min_workers = max(1, min(job.min_workers, state["registered"] or expected, expected))
        if before is not None:
            job.policy, job.workers_wanted = before.job.policy, before.job.workers_wanted
        elif JobRules.from_json(state["rules"]).policy == job.rules.policy:
            job.policy = policy(*state["policy"])
        self.reported.recover(state)
        job.collectives.restore(state)
        self.ledger.restore(state["loops"])
        self.membership.restore({int(worker): seq for worker, seq in state["pushes"].items()})
        self.cuts.started(job.version, now)

    def load_state(
        self, state: Mapping[str, Any], model: ModelSpec | None, now: float, snapshot: int = 0
    ) -> None:
        """Load the state of `complete_state`.

        Args:
            state: The state.
            model: The model.
            now: The time.
            snapshot: Index of the newest snapshot's Cut; a reshard before it is complete.
        """
        job = self.job
        job.load_numbers(state, model)
        job.set_shard_count(state["shards"], state["layout_index"])
        job.reshard = ReshardPhase.from_state(state["move"]) if state["move"] else None
        job.is_reshard_saved = job.reshard is not None and job.reshard.index < snapshot
        job.log.recover(state["log"])
        job.begun, job.uploading_worker = state["begun"], state["uploader"]
        job.log_id, job.started = state["epoch"], state["started"]
        job.is_resumed = state["resumed"]
        job.policy = policy(*state["policy"])
        job.reported.recover(state)
        job.collectives.recover(state)
        job.membership.recover(state["roster"], now)
        job.pending.recover(state["pending"])
        job.ledger.recover(state["loops"], state.get("places", ()))
        if state.get("extendable"):
            job.ledger.resumes()
        job.evicted, job.followers = set(state["evicted"]), set(state["followers"])
        job.min_workers = state["min_workers"]
        job.cuts.recover(state["last_cut"], state["cut"], now)

    def recovered(self, now: float, generation: int, resumes: bool = False) -> None:
        """Continue in a new process after a replay. Leases begin now; a snapshot is abandoned.

        The log may lack its newest commands, and with them workers that joined: their numbers
        are not given again. If all workers had left, a new run begins: it waits for --min-workers
        and has no wanted number of workers.

        Args:
            now: The time.
            generation: Number of this start of the servers.
            resumes: The next worker may begin another run, and change what a resumed job allows.
        """
        job = self.job
        self.membership.begin_generation(generation)
        if resumes:
            job.is_resumed = job.begun
            self.ledger.resumes()
        if self.membership.have_all_left:
            job.started, job.workers_wanted = False, None
        self.cuts.abandon()
        self.cuts.started(job.version, now)
        self.resharding.continue_after_restart(now)
        for member in self.membership.current():
            member.last_seen = member.joined_at = now
            member.missing_since, member.step_timer = None, StepTimer()
        self.rounds.advance(now)
