"""One shard's side of the log: staged pushes, entries to carry out, outcomes of pushes.

Theory of operation. The log is a replicated state machine (Schneider, 1990): every shard carries
out the same entries in the same order, so all shards reach the same state.

States of a push on a shard: unknown, staged, applied, stale, rejected. States of the shard: it
follows no log, it has no weights (before Begin), it has weights, it waits for its part of the
model (between a Reshard and `finish_reshard`).

Events: a complete push arrives (`offer`), entries arrive (`accept`), an entry was carried out
(`done`). The caller keeps the bytes of a push that `offer` accepts, and carries out the entries
that `accept` returns, in order, with `done` after each.

Invariants:

- Entries may arrive twice, late or out of order. Each is carried out once, in the order of their
  numbers.
- An Apply or SetBuffers uses only pushes that this shard has staged; anything else is a
  LogInvariantError.
- `outcome` answers for a push as often as it is asked: while it is among the newest
  OUTCOMES_PER_WORKER pushes of its worker with its own result, later as applied.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pscommon.core.entry_encoding import chained
from pscommon.core.log_entries import (
    Apply,
    Begin,
    Cut,
    Entry,
    Evict,
    Measure,
    Measured,
    PushKey,
    Reject,
    Reshard,
    SetBuffers,
    ShardReport,
    Staged,
)

OUTCOMES_PER_WORKER = 16
"""Outcomes kept per worker, for answers that are lost. A worker has far fewer pushes in flight."""

MAX_EVICTED_WORKERS = 1000
"""Newest evicted workers whose pushes a shard answers without the coordinator."""

GIVEN_UP = "its worker has gone on to another push"
"""Detail of a push that will never count, and that some shard may lack."""

NO_LOG = -1
"""Epoch of a shard that does not follow any log yet."""


class LogInvariantError(Exception):
    """An entry cannot be carried out: a bug of this system, never a mistake of a user."""


@dataclass(frozen=True, slots=True)
class PushOutcome:
    """How a push ended on this shard.

    Attributes:
        status: applied, stale or rejected.
        version: Version of the weights after it.
        staleness: Updates since the version that it was computed from.
    """

    status: str
    version: int
    staleness: int = 0
    reason: str = ""
    detail: str = ""


class ShardMachine:
    """The machine; the text of the module describes it.

    Attributes:
        log_id: Id of the log that it follows.
        version: Number of applied updates.
        index: Number of entries carried out.
        digest: Digest of these entries.
        weights_version: Version of its weights: under policy allreduce that of the newest upload.
        begun: Whether it has weights.
        is_resharding: Whether it waits for its part of the model after a Reshard.
        staged: Pushes that are not decided.
        measured: Answer to the newest Measure, until its pushes count or are void.
    """

    def __init__(self, shard: int) -> None:
        self.shard = shard
        self.log_id = NO_LOG
        self.version = 0
        self.index = 0
        self.digest = 0
        self.weights_version = 0
        self.begun = False
        self.is_resharding = False
        self.staged: dict[PushKey, Staged] = {}
        self.measured: Measured | None = None
        self._unreported: dict[PushKey, Staged] = {}
        self._ended: list[PushKey] = []  # pushes that the current entry ends
        self._staged_of: dict[int, set[int]] = {}  # numbers of staged pushes by worker
        self._last_returned = 0  # last entry that accept() returned
        self._early: dict[int, Entry] = {}
        self._outcomes: dict[int, OrderedDict[int, PushOutcome]] = {}
        self._evicted: dict[int, str] = {}

    def restore(self, log_id: int, version: int, index: int) -> None:
        """Continue from a snapshot; the log begins after `index`."""
        self.version = self.weights_version = version
        self.begun = True
        self.follow(log_id, index)

    def state(self) -> dict[str, Any]:
        """Return all but the staged pushes as JSON values for `recover`."""
        return {
            "epoch": self.log_id,
            "index": self.index,
            "digest": self.digest,
            "version": self.version,
            "begun": self.begun,
            "moving": self.is_resharding,
            "evicted": [[worker, reason] for worker, reason in self._evicted.items()],
            "outcomes": [
                [
                    worker,
                    [
                        [seq, o.status, o.version, o.staleness, o.reason, o.detail]
                        for seq, o in known.items()
                    ],
                ]
                for worker, known in self._outcomes.items()
            ],
            **({"measured": list(self.measured)} if self.measured is not None else {}),
        }

    def recover(self, state: Mapping[str, Any]) -> None:
        """Load a `state`. The caller then replays the log through `offer` and `accept`."""
        self.log_id, self.index, self._last_returned = (
            state["epoch"],
            state["index"],
            state["index"],
        )
        self.version, self.begun, self.digest = state["version"], state["begun"], state["digest"]
        self.weights_version = self.version  # under policy allreduce there is no such state
        self.is_resharding = state["moving"]
        self.measured = Measured(*state["measured"]) if "measured" in state else None
        self._evicted = dict(state["evicted"])
        self._outcomes = {
            worker: OrderedDict((seq, PushOutcome(*values)) for seq, *values in known)
            for worker, known in state["outcomes"]
        }

    def adopt(self, state: Mapping[str, Any]) -> None:
        """Join a reshard as a new shard: take over a peer's state, without pushes or weights."""
        self.recover({**state, "moving": True})

    def finish_reshard(self) -> None:
        """Note that the shard has its new part of the model."""
        self.is_resharding = False

    def follow(self, log_id: int, base: int) -> None:
        """Follow a log whose entries begin after `base`."""
        if log_id != self.log_id:
            self._early.clear()
            self.measured = None
            self.log_id, self.index, self._last_returned, self.digest = log_id, base, base, 0
        else:
            self.index = self._last_returned = max(base, self._last_returned)

    def offer(self, push: Staged) -> bool:
        """Stage a complete push. Return False if it is known or its worker is evicted.

        Initial weights (seq 0) are refused once there are weights, because no entry would ever
        remove them. During a reshard every push is refused: it may have the earlier partition.
        """
        key = push.key
        is_late_upload = self.begun and key.seq == 0
        if (
            self.is_resharding
            or key in self.staged
            or is_late_upload
            or self.outcome(key) is not None
        ):
            return False
        self.staged[key] = self._unreported[key] = push
        self._staged_of.setdefault(key.worker, set()).add(key.seq)
        return True

    def _unstage(self, key: PushKey) -> Staged | None:
        """Remove a push, if it is staged."""
        push = self.staged.pop(key, None)
        if push is not None:
            self._ended.append(key)
            self._unreported.pop(key, None)
            numbers = self._staged_of[key.worker]
            numbers.remove(key.seq)
            if not numbers:
                del self._staged_of[key.worker]
        return push

    def _staged_by(self, worker: int) -> list[PushKey]:
        return [PushKey(worker, seq) for seq in self._staged_of.get(worker, ())]

    def outcome(self, key: PushKey) -> PushOutcome | None:
        """Return how a push ended; None while it is undecided."""
        if key.worker in self._evicted:
            return PushOutcome(
                "rejected", self.version, reason="FENCED", detail=self._evicted[key.worker]
            )
        known: dict[int, PushOutcome] = self._outcomes.get(key.worker, {})
        if key.seq in known:
            return known[key.seq]
        if not known or key.seq > next(reversed(known)):
            return None
        if key.seq == 0 or (len(known) == OUTCOMES_PER_WORKER and key.seq < min(known)):
            return PushOutcome("applied", self.version, detail="long ago")
        return PushOutcome("stale", self.version, reason="STALE", detail=GIVEN_UP)

    def is_known(self, key: PushKey) -> bool:
        """Return whether the push is staged or decided.

        Once there are weights, initial weights of any worker count as decided.
        """
        return key in self.staged or (self.begun and key.seq == 0) or self.outcome(key) is not None

    def answer(self, key: PushKey | None, version: int) -> PushOutcome | None:
        """Return how a push ended, once the shard has `version`; None before.

        A stale or rejected push needs no version. Once there are weights, initial weights count as
        applied.

        key: The push. None: the outcome is "none", with the newest version.
        """
        outcome = self.outcome(key) if key is not None else PushOutcome("none", self.version)
        if outcome is None and key is not None and key.seq == 0:
            outcome = PushOutcome("applied", self.version)
        if outcome is None or outcome.status in ("stale", "rejected"):
            return outcome
        return outcome if self.begun and self.version >= version else None

    def accept(self, log_id: int, entries: Iterable[Entry]) -> list[Entry]:
        """Return the entries to carry out now, in order. Later ones are kept, others ignored."""
        for entry in entries:
            if log_id == self.log_id and entry.index > self._last_returned:
                self._early[entry.index] = entry
        ready = []
        while self._last_returned + 1 in self._early:
            self._last_returned += 1
            ready.append(self._early.pop(self._last_returned))
        return ready

    def done(self, entry: Entry, square_norm: float = 0.0) -> list[PushKey]:
        """Note that an entry was carried out. Return the pushes that are no longer staged.

        Args:
            entry: The entry.
            square_norm: The result of a Measure.
        """
        if entry.index != self.index + 1:
            raise LogInvariantError(
                f"shard {self.shard}: entry {entry.index} done after {self.index}"
            )
        self.index, self.digest = entry.index, chained(self.digest, entry)
        self._carry_out(entry, square_norm)
        ended, self._ended = self._ended, []
        return ended

    def _carry_out(self, entry: Entry, square_norm: float) -> None:
        match entry:
            case Begin():
                self.begun = True
                self._unstage(PushKey(entry.worker, 0))
            case Apply():
                self._apply(entry)
            case Measure():
                if self.is_resharding or self.missing(entry):
                    raise self._invariant_error(entry)
                self.measured = Measured(entry.index, square_norm)
            case SetBuffers():
                self._set_buffers(entry)
            case Reject():
                self._reject(entry)
            case Evict():
                self._evict(entry)
                for key in self._staged_by(entry.worker):
                    self._unstage(key)
            case Reshard():
                for key in [*self.staged]:
                    self._unstage(key)
                self.is_resharding, self.measured = True, None
            case Cut():
                pass

    def _evict(self, entry: Evict) -> None:
        self._evicted.pop(entry.worker, None)
        self._evicted[entry.worker] = entry.reason
        # a later push of such a worker makes the coordinator evict it again
        while len(self._evicted) > MAX_EVICTED_WORKERS:
            del self._evicted[next(iter(self._evicted))]
        self._outcomes.pop(entry.worker, None)

    def missing(self, entry: Entry) -> list[PushKey]:
        """Return the pushes that an entry counts and this shard lacks; there must be none."""
        match entry:
            case Apply() | Measure():
                return [c.key for c in entry.contributions if c.key not in self.staged]
            case SetBuffers():
                return [] if entry.key in self.staged else [entry.key]
            case Begin():
                key = PushKey(entry.worker, 0)
                return [] if key in self.staged else [key]
        return []

    def _apply(self, entry: Apply) -> None:
        if self.is_resharding or entry.version != self.version + 1 or self.missing(entry):
            raise self._invariant_error(entry)
        self.version, self.measured = entry.version, None
        if not self.staged[entry.contributions[0].key].reduce_round:
            self.weights_version = entry.version
        for contribution in entry.contributions:
            staleness = entry.version - 1 - contribution.base
            self._decide(contribution.key, PushOutcome("applied", entry.version, staleness))

    def _set_buffers(self, entry: SetBuffers) -> None:
        if self.is_resharding or self.missing(entry):
            raise self._invariant_error(entry)
        if self.staged[entry.key].upload:
            self.weights_version = self.version
        self._decide(entry.key, PushOutcome("applied", self.version))

    def _invariant_error(self, entry: Apply | Measure | SetBuffers) -> LogInvariantError:
        return LogInvariantError(
            f"shard {self.shard} at version {self.version} cannot apply {entry}"
        )

    def _reject(self, entry: Reject) -> None:
        push = self.staged.get(entry.key)
        status = "stale" if entry.reason == "STALE" else "rejected"
        staleness = self.version - push.base if push else 0
        self._decide(
            entry.key, PushOutcome(status, self.version, staleness, entry.reason, entry.detail)
        )

    def _decide(self, key: PushKey, outcome: PushOutcome) -> None:
        """Record how a push ended, and drop it and the staged ones that its worker gave up."""
        self._unstage(key)
        known = self._outcomes.setdefault(key.worker, OrderedDict())
        known[key.seq] = outcome
        if len(known) > OUTCOMES_PER_WORKER:
            known.popitem(last=False)
        for other in self._staged_by(key.worker) if key.worker in self._staged_of else ():
            if self.outcome(other) is not None:
                self._unstage(other)

    def report(self, only_new: bool = False) -> ShardReport:
        """Return the report to the coordinator.

        only_new: Leave out pushes that an earlier report had.
        """
        pushes = self._unreported if only_new else self.staged
        report = ShardReport(
            self.shard,
            self.log_id,
            self.index,
            tuple(pushes.values()),
            digest=self.digest,
            is_resharding=self.is_resharding,
            measured=self.measured,
        )
        self._unreported.clear()
        return report
