"""One shard's side of the log: what is staged, which entries to carry out next, how each push
ended.

The shell asks `offer` before it keeps a push, hands entries as they come to `accept` and carries
out what that returns, in order, calling `done` after each. Entries may come twice, late or out
of order; only the next one by number is ever carried out, and an entry is acted on once. A push
is answered from `outcome`, now or whenever it is asked for again.
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
    ShardReport,
    Staged,
)

REMEMBERED = 16
"""Outcomes kept per worker, for answers lost on the way; a worker has far fewer pushes in
flight.
"""

EVICTED_KEPT = 1000
"""Evicted workers whose pushes a shard answers by itself, the newest ones."""

GIVEN_UP = "its worker has gone on to another push"
"""Why a push will never count that some shard may lack."""

NO_LOG = -1
"""Epoch of a shard that does not follow any log yet."""


class LogInvariantError(Exception):
    """The log asks for what cannot be: a bug of this system, never a user's mistake."""


@dataclass(frozen=True, slots=True)
class PushOutcome:
    """How a push ended here: status applied, stale or rejected; version after it; staleness:
    updates since its base.
    """

    status: str
    version: int
    staleness: int = 0
    reason: str = ""
    detail: str = ""


class ShardMachine:
    """The machine. version: applied updates; index: log entries carried out, and their digest.

    moving: the model was dealt to another number of shards, and this one does not hold its new
    part yet. measured: the answer to the newest Measure, until its pushes count or are void.
    """

    def __init__(self, shard: int) -> None:
        self.shard = shard
        self.epoch = NO_LOG
        self.version = 0
        self.index = 0
        self.digest = 0
        self.begun = False
        self.moving = False
        self.staged: dict[PushKey, Staged] = {}
        self.measured: Measured | None = None
        self._handed = 0  # last entry that accept() gave out
        self._early: dict[int, Entry] = {}
        self._outcomes: dict[int, OrderedDict[int, PushOutcome]] = {}
        self._evicted: dict[int, str] = {}

    def restore(self, epoch: int, version: int, index: int) -> None:
        """Go on from a snapshot; the log starts anew after `index`."""
        self.version, self.begun = version, True
        self.follow(epoch, index)

    def state(self) -> dict[str, Any]:
        """What its log begins with, JSON-ready: all but the pushes that are staged."""
        return {
            "epoch": self.epoch,
            "index": self.index,
            "digest": self.digest,
            "version": self.version,
            "begun": self.begun,
            "moving": self.moving,
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
        """Be the machine whose state this is; what its log holds besides comes through `offer`
        and `accept`.
        """
        self.epoch, self.index, self._handed = state["epoch"], state["index"], state["index"]
        self.version, self.begun, self.digest = state["version"], state["begun"], state["digest"]
        self.moving = state["moving"]
        self.measured = Measured(*state["measured"]) if "measured" in state else None
        self._evicted = dict(state["evicted"])
        self._outcomes = {
            worker: OrderedDict((seq, PushOutcome(*values)) for seq, *values in known)
            for worker, known in state["outcomes"]
        }

    def adopt(self, state: Mapping[str, Any]) -> None:
        """Join the others in a move: know what one of them knows, and hold nothing yet."""
        self.recover({**state, "moving": True})

    def moved(self) -> None:
        """Its new part is here."""
        self.moving = False

    def follow(self, epoch: int, base: int) -> None:
        """This is the log to follow, kept from `base` on."""
        if epoch != self.epoch:
            self._early.clear()
            self.measured = None
            self.epoch, self.index, self._handed, self.digest = epoch, base, base, 0
        else:
            self.index = self._handed = max(base, self._handed)

    def offer(self, push: Staged) -> bool:
        """A push has come, whole. True: it is new, keep its bytes; False: it was here before, or
        its worker is out.

        Initial weights (seq 0) that come once there are weights are a late copy: no entry would
        ever let go of them. Nothing is taken in a move: it may be of the layout before.
        """
        key = push.key
        is_late_upload = self.begun and key.seq == 0
        if self.moving or key in self.staged or is_late_upload or self.outcome(key) is not None:
            return False
        self.staged[key] = push
        return True

    def outcome(self, key: PushKey) -> PushOutcome | None:
        """How a push ended; None while that is open."""
        if key.worker in self._evicted:
            return PushOutcome(
                "rejected", self.version, reason="FENCED", detail=self._evicted[key.worker]
            )
        known: dict[int, PushOutcome] = self._outcomes.get(key.worker, {})
        if key.seq in known:
            return known[key.seq]
        if not known or key.seq > next(reversed(known)):
            return None
        if key.seq == 0 or (len(known) == REMEMBERED and key.seq < min(known)):
            return PushOutcome("applied", self.version, detail="long ago")
        return PushOutcome("stale", self.version, reason="STALE", detail=GIVEN_UP)

    def knows(self, key: PushKey) -> bool:
        """Is the push staged, or decided? Of initial weights, once there are any, it makes no
        difference whose.
        """
        return key in self.staged or (self.begun and key.seq == 0) or self.outcome(key) is not None

    def answers(self, key: PushKey | None, version: int) -> bool:
        """Can it be told how the push ended (None: there is none), and is `version` here if it
        was not rejected?
        """
        outcome = self.outcome(key) if key is not None else None
        if outcome is not None and outcome.status != "applied":
            return True
        decided = outcome is not None or key is None or key.seq == 0
        return decided and self.begun and self.version >= version

    def accept(self, epoch: int, entries: Iterable[Entry]) -> list[Entry]:
        """The entries that are to be carried out now, in order; the rest is kept, known already
        or void.
        """
        for entry in entries:
            if epoch == self.epoch and entry.index > self._handed:
                self._early[entry.index] = entry
        ready = []
        while self._handed + 1 in self._early:
            self._handed += 1
            ready.append(self._early.pop(self._handed))
        return ready

    def done(self, entry: Entry, square_norm: float = 0.0) -> None:
        """The shell has carried this entry out. square_norm: what it measured, where the entry
        is a Measure.
        """
        if entry.index != self.index + 1:
            raise LogInvariantError(
                f"shard {self.shard}: entry {entry.index} done after {self.index}"
            )
        self.index, self.digest = entry.index, chained(self.digest, entry)
        match entry:
            case Begin():
                self.begun = True
                self.staged.pop(PushKey(entry.worker, 0), None)
            case Apply():
                self._applied(entry)
            case Measure():
                if self.moving or self.missing(entry):
                    raise self._unfit(entry)
                self.measured = Measured(entry.index, square_norm)
            case Reject():
                self._rejected(entry)
            case Evict():
                self._evict(entry)
                for key in [key for key in self.staged if key.worker == entry.worker]:
                    del self.staged[key]
            case Reshard():
                self.staged.clear()
                self.moving, self.measured = True, None
            case Cut():
                pass

    def _evict(self, entry: Evict) -> None:
        self._evicted.pop(entry.worker, None)
        self._evicted[entry.worker] = entry.reason
        while (
            len(self._evicted) > EVICTED_KEPT
        ):  # a later push of such a worker makes the coordinator evict it again
            del self._evicted[next(iter(self._evicted))]
        self._outcomes.pop(entry.worker, None)

    def missing(self, entry: Entry) -> list[PushKey]:
        """Pushes that an entry counts and this shard does not hold; anything in it is a bug."""
        if not isinstance(entry, Apply | Measure):
            return []
        return [c.key for c in entry.contributions if c.key not in self.staged]

    def _applied(self, entry: Apply) -> None:
        if self.moving or entry.version != self.version + 1 or self.missing(entry):
            raise self._unfit(entry)
        self.version, self.measured = entry.version, None
        for contribution in entry.contributions:
            del self.staged[contribution.key]
            staleness = entry.version - 1 - contribution.base
            self._ended(contribution.key, PushOutcome("applied", entry.version, staleness))
        self._drop_given_up()

    def _unfit(self, entry: Apply | Measure) -> LogInvariantError:
        return LogInvariantError(
            f"shard {self.shard} at version {self.version} cannot apply {entry}"
        )

    def _rejected(self, entry: Reject) -> None:
        push = self.staged.pop(entry.key, None)
        status = "stale" if entry.reason == "STALE" else "rejected"
        staleness = self.version - push.base if push else 0
        self._ended(
            entry.key, PushOutcome(status, self.version, staleness, entry.reason, entry.detail)
        )
        self._drop_given_up()

    def _drop_given_up(self) -> None:
        """Of what a worker pushed before one that is decided now, no entry will ever speak."""
        for key in [key for key in self.staged if self.outcome(key) is not None]:
            del self.staged[key]

    def _ended(self, key: PushKey, outcome: PushOutcome) -> None:
        known = self._outcomes.setdefault(key.worker, OrderedDict())
        known[key.seq] = outcome
        if len(known) > REMEMBERED:
            known.popitem(last=False)

    def report(self) -> ShardReport:
        """Everything that the coordinator needs to know, whole."""
        return ShardReport(
            self.shard,
            self.epoch,
            self.index,
            tuple(self.staged.values()),
            digest=self.digest,
            moving=self.moving,
            measured=self.measured,
        )
