"""The coordinator: the one place that decides. It runs on shard 0 and writes the job's log.

Theory of operation. Workers join (a lease), register (the model; the first one uploads the weights), push to all
shards and leave. Shards report, whole, what they have staged. A push that every shard holds is ready; `_advance` asks
the policy which ready pushes make the next update and appends an Apply. All else that can happen to a push is an entry,
too: Reject (a shard found NaN, or it is too old) and Evict (its worker left, or its lease ended). The batches that a
push used are committed with its Apply, so data and weights never disagree.

Nothing here waits. A request that cannot be answered yet gets None, and is asked again when something has changed. No
clock either: `now` is an argument. Requests may be repeated.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from pscommon.core.errors import FencedError, InvalidRequestError, MismatchError
from pscommon.core.log import Apply, BatchKey, Begin, Contribution, Cut, Entry, Evict, PushKey, Reject, Report, Staged
from pscommon.core.loop import LoopSpec
from pscommon.core.model import ModelSpec
from psserver.core.cuts import Cuts, Every
from psserver.core.ledger import Ledger
from psserver.core.policy import Policy, choose
from psserver.core.roster import Member, Roster, State

PAUSE = 1.0
"""Seconds between ticks from which on this process counts as having been stopped itself."""


@dataclass(frozen=True, slots=True)
class Batches:
    """Answer to a request for data: numbers to compute on; or none: come back with nothing in hand; or the end."""

    numbers: tuple[int, ...] = ()
    end: bool = False


class Coordinator:
    """The machine; see the module's text.

    shards: how many there are; min_workers: how many the first round waits for; lease: seconds; generation: how often
    this job's servers were started before, so that no worker's number is ever given twice.
    """

    def __init__(
        self,
        shards: int,
        policy: Policy,
        min_workers: int,
        lease: float,
        every: Every | None = None,
        generation: int = 0,
    ) -> None:
        self.shards = shards
        self.epoch = generation
        self.policy = policy
        self.min_workers = min_workers
        self.roster = Roster(lease, generation)
        self.ledger = Ledger()
        self.cuts = Cuts(every or Every(), shards)
        self.model: ModelSpec | None = None
        self.begun = False
        self.started = False
        self.stopping = False
        self.version = 0
        self.samples = 0
        self.counts = {"applied": 0, "stale": 0, "rejected": 0}
        self.metrics: dict[str, tuple[int, float]] = {}
        self._index = 0
        self._log: dict[int, Entry] = {}
        self._reached = dict.fromkeys(range(shards), 0)
        self._held: dict[PushKey, set[int]] = {}
        self._ready: dict[PushKey, Staged] = {}
        self._uploader: int | None = None
        self._resumed = False
        self._last_tick: float | None = None

    # ---- membership -------------------------------------------------------------------------------------------------

    def join(self, now: float, rank: int | None, host: str, pid: int, device: str) -> Member:
        """A place for a worker; it counts in no round before it has registered."""
        return self.roster.join(now, rank, host, pid, device)

    def member(self, worker: int, now: float) -> Member:
        """The worker that sent a request, which renews its lease. FencedError if the job went on without it."""
        member = self.roster.members.get(worker)
        if member is None or not member.alive:
            why = member.reason if member else "it is not a worker of this job"
            raise FencedError(f"worker {worker} is out of the job: {why}")
        member.last_seen = now
        return member

    def register(self, worker: int, spec: ModelSpec, now: float) -> Literal["ready", "upload", "pending"]:
        """State the model. MismatchError lists the differences to the job's."""
        member = self.member(worker, now)
        if self.model is None:
            self.model, self._uploader = spec, worker
        if self._resumed and not replace(spec, optimizer=self.model.optimizer).differences(self.model):
            self._adopt_optimizer(spec)
        if differences := spec.differences(self.model):
            raise MismatchError(
                "this worker's model is not the job's:\n  " + "\n  ".join(differences), "MODEL_MISMATCH"
            )
        if not self.begun:
            return "upload" if self._uploader == worker else "pending"
        self._resumed = False
        self.roster.activate(member)
        self._advance(now)
        return "ready"

    def _adopt_optimizer(self, spec: ModelSpec) -> None:
        """The first worker of a resumed job may bring other hyper-parameters, such as a lower learning rate."""
        assert self.model is not None
        mine, theirs = self.model.optimizer, spec.optimizer
        if mine.name == theirs.name and len(mine.groups) == len(theirs.groups):
            self.model = replace(self.model, optimizer=theirs)

    def leave(self, worker: int, reason: str, now: float) -> None:
        """The worker is done (reason empty) or gives up. Nobody waits for it any more; repeating this is harmless."""
        member = self.roster.members.get(worker)
        if member is not None and member.alive:
            self._remove(member, State.LEFT, reason, now)

    def _remove(self, member: Member, state: State, reason: str, now: float) -> None:
        self.roster.remove(member, state, reason)
        self.ledger.give_back(member.worker)
        for key in [key for key in self._held if key.worker == member.worker]:
            del self._held[key]
            self._ready.pop(key, None)
        if self._uploader == member.worker and not self.begun:
            self.model = self._uploader = None
        self._append(Evict(self._index + 1, member.worker, reason or "it left the job"))
        self._end_loops()
        self._advance(now)

    def tick(self, now: float) -> list[Member]:
        """Time passes: ends leases, starts snapshots that are due. Returns the workers that were lost."""
        gap = now - self._last_tick if self._last_tick is not None else 0.0
        self._last_tick = now
        if gap > PAUSE:
            self.roster.forgive(gap)
        lost = self.roster.expired(now)
        for member in lost:
            silent = now - member.last_seen
            self._remove(member, State.LOST, f"nothing heard from it for {silent:.1f} s; its lease ended", now)
        self._cut_if_due(now)
        return lost

    # ---- data -------------------------------------------------------------------------------------------------------

    def next_batches(
        self, worker: int, spec: LoopSpec, received: int, count: int, idle: bool, now: float
    ) -> Batches | None:
        """Data for a worker that has got `received` batches of this loop so far; an answer that was lost is repeated.

        idle: it has nothing in hand, and sits out of rounds until there is a batch or the end.
        """
        member = self.member(worker, now)
        if not self._all_here():
            return None
        try:
            loop = self.ledger.open(worker, spec)
        except ValueError as error:
            raise InvalidRequestError(str(error)) from error
        if loop.ended:
            return Batches(end=True)
        together = [m.worker for m in self.roster.registered()] if self.policy.barrier else [worker]
        numbers = loop.take(worker, received, count, together if worker in together else [*together, worker])
        for other in self.roster.registered():
            if (other.worker == worker and numbers) or (other.waiting == spec.loop and loop.has_dealt(other.worker)):
                self._wake(other)
        if numbers or not idle:
            return Batches(tuple(numbers))
        if loop.holds(worker):  # a rest that is too small for its script to push, or that it pushes after the loop
            return Batches(end=True)
        member.waiting = spec.loop
        if member.state is State.ACTIVE:
            member.state = State.IDLE
        self._end_loops()
        self._advance(now)
        return Batches(end=True) if loop.ended else None

    def return_batches(self, worker: int, batches: Iterable[BatchKey], now: float) -> None:
        """These will not be pushed; somebody else may have them."""
        self.member(worker, now)
        for key in batches:
            if key.loop in self.ledger.loops:
                self.ledger.loops[key.loop].give_back(worker, [key.number])

    def _wake(self, member: Member) -> None:
        member.waiting = None
        if member.state is State.IDLE:
            self.roster.activate(member)

    def _end_loops(self) -> None:
        """A loop ends for all at once, when every batch has counted; a holder may die, so others wait till then."""
        for number in {m.waiting for m in self.roster.here() if m.waiting is not None}:
            loop = self.ledger.loops[number]
            if loop.free == 0 and loop.leased == 0:
                loop.ended = True
                for member in self.roster.here():
                    if member.waiting == number:
                        self._wake(member)

    def report_metrics(self, worker: int, metrics: dict[str, float], now: float) -> None:
        """Values that scripts report. Where several workers report one, the first in worker order is believed."""
        member = self.member(worker, now)
        for name, value in metrics.items():
            rank, _ = self.metrics.get(name, (member.rank, value))
            if member.rank <= rank:
                self.metrics[name] = (member.rank, value)

    # ---- the log ----------------------------------------------------------------------------------------------------

    def report(self, report: Report, now: float) -> None:
        """What a shard holds and how far it is. What is said about an earlier start of the log is void."""
        if report.epoch != self.epoch:
            return
        self._reached[report.shard] = max(self._reached[report.shard], report.index)
        for staged in report.staged:
            self._staged(report.shard, staged)
        self._trim()
        self._advance(now)

    def shard_lost(self, shard: int) -> None:
        """A shard's process is new and holds nothing. Once there are weights, all go back to a snapshot instead."""
        for key, held in self._held.items():
            held.discard(shard)
            self._ready.pop(key, None)

    @property
    def uploader(self) -> Member | None:
        """Who has to upload the initial weights."""
        return self.roster.members.get(self._uploader or 0)

    @property
    def ready_workers(self) -> set[int]:
        """Workers with a push that all shards hold and that is not decided."""
        return {key.worker for key in self._ready}

    @property
    def base(self) -> int:
        """Entries up to here are not kept: every shard has carried them out."""
        return min(self._log, default=self._index + 1) - 1

    @property
    def last_index(self) -> int:
        """Number of the newest log entry."""
        return self._index

    def entries_after(self, index: int) -> list[Entry]:
        """The part of the log that a shard which is at `index` needs."""
        return [self._log[i] for i in range(index + 1, self._index + 1) if i in self._log]

    def _staged(self, shard: int, staged: Staged) -> None:
        key = staged.key
        member = self.roster.members.get(key.worker)
        if member is None or not member.alive:
            return self._fence_stranger(key.worker)
        if key.seq <= member.seq and not (key.seq == 0 and not self.begun):
            return None
        if staged.problem:
            reason, _, detail = staged.problem.partition(": ")
            return self._reject(key, reason, f"{member}: {detail}")
        held = self._held.setdefault(key, set())
        held.add(shard)
        if len(held) == self.shards:
            self._ready.setdefault(key, staged)
        return None

    def _fence_stranger(self, worker: int) -> None:
        """A push of a worker that is out (since before a restart, say): the shards must let go of it."""
        if not any(isinstance(entry, Evict) and entry.worker == worker for entry in self._log.values()):
            self._append(Evict(self._index + 1, worker, "it is not a worker of this job any more"))

    def _advance(self, now: float) -> None:
        """Append all updates that can be decided now."""
        self._begin_if_uploaded(now)
        if not self.begun or not self._all_here():
            return
        self._reject_stale()
        while keys := choose(self.policy, self.roster.clocks(), self._oldest_ready()):
            self._apply(keys)
            self._cut_if_due(now)

    def _begin_if_uploaded(self, now: float) -> None:
        if not self.begun and self._uploader is not None and PushKey(self._uploader, 0) in self._ready:
            self._forget(PushKey(self._uploader, 0))
            self._append(Begin(self._index + 1, self._uploader))
            self.begun = True
            self.cuts.started(0, now)

    def _all_here(self) -> bool:
        """The first round waits for --min-workers; later ones go by who is alive."""
        self.started = self.started or (self.begun and len(self.roster.registered()) >= self.min_workers)
        return self.started

    def _oldest_ready(self) -> dict[int, PushKey]:
        """Each active worker's oldest push that all shards hold, in order of arrival. A push ends a wait for data."""
        oldest: dict[int, PushKey] = {}
        for key in self._ready:
            member = self.roster.members[key.worker]
            if member.state is State.IDLE:
                self._wake(member)
            if member.state is State.ACTIVE and (key.worker not in oldest or key.seq < oldest[key.worker].seq):
                oldest[key.worker] = key
        return oldest

    def _reject_stale(self) -> None:
        limit = self.policy.max_staleness
        if limit is None:
            return
        for key, staged in list(self._ready.items()):
            if self.version - staged.base > limit:
                self._reject(key, "STALE", f"computed from version {staged.base}, {self.version - staged.base} ago")

    def _apply(self, keys: Iterable[PushKey]) -> None:
        self.version += 1
        pushes = [self._ready[key] for key in keys]
        contributions = tuple(Contribution(p.key, p.samples, p.base) for p in pushes)
        self._append(Apply(self._index + 1, self.version, contributions))
        for push in pushes:
            self._count(push)
        self._reject_stale()

    def _count(self, push: Staged) -> None:
        member = self.roster.members[push.key.worker]
        member.clock += 1
        member.steps += 1
        self.samples += push.samples
        self.counts["applied"] += 1
        for batch in push.batches:
            if batch.loop in self.ledger.loops:
                self.ledger.loops[batch.loop].commit(push.key.worker, batch.number)
        self._forget(push.key)
        self._end_loops()

    def _reject(self, key: PushKey, reason: str, detail: str) -> None:
        self._append(Reject(self._index + 1, key, reason, detail))
        self.counts["stale" if reason == "STALE" else "rejected"] += 1
        self._forget(key)

    def _forget(self, key: PushKey) -> None:
        member = self.roster.members[key.worker]
        member.seq = max(member.seq, key.seq)
        self._held.pop(key, None)
        self._ready.pop(key, None)

    def _append(self, entry: Entry) -> None:
        self._index += 1
        self._log[self._index] = entry

    def _trim(self) -> None:
        """All shards have carried these out."""
        for index in range(self.base + 1, min(self._reached.values()) + 1):
            self._log.pop(index, None)

    # ---- snapshots --------------------------------------------------------------------------------------------------

    def cut(self, now: float) -> None:
        """Snapshot the version that stands, unless one is being written."""
        if self.begun and not self.cuts.busy:
            self._append(Cut(self._index + 1, self.version))
            self.cuts.begin(self.version, self._index, now, self.state())

    def _cut_if_due(self, now: float) -> None:
        if self.begun and self.cuts.due(self.version, now):
            self.cut(now)

    def state(self) -> dict[str, Any]:
        """What a snapshot keeps of the coordinator, as JSON: data position, duplicate table, counts."""
        return {
            "version": self.version,
            "index": self._index,
            "samples": self.samples,
            "applied": self.counts["applied"],
            "pushes": {str(m.worker): m.seq for m in self.roster},
            "loops": self.ledger.state(),
        }

    def restore(self, state: dict[str, Any], model: ModelSpec, now: float) -> None:
        """Go on from a snapshot, with workers yet to come."""
        self.model, self.begun, self._resumed = model, True, True
        self.version, self._index, self.samples = state["version"], state["index"], state["samples"]
        self.counts["applied"] = state["applied"]
        self.ledger.restore(state["loops"])
        self.roster.restore({int(worker): seq for worker, seq in state["pushes"].items()})
        self._reached = dict.fromkeys(range(self.shards), self._index)
        self.cuts.started(self.version, now)
