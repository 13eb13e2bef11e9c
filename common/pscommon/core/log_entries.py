"""The job's log: the one ordered list of decisions that every shard follows.

Shard 0's coordinator writes it, each shard carries it out in order, and nothing else changes a
weight. A decision to apply a gradient is written only after every shard has said that it holds
its part, so a gradient counts on all shards or on none, and version v means the same sum of
pushes everywhere.
"""

from dataclasses import dataclass
from typing import NamedTuple


class PushKey(NamedTuple):
    """Names one push for ever. A worker counts its pushes from 1; seq 0 is its upload of initial
    weights.
    """

    worker: int
    seq: int


class BatchKey(NamedTuple):
    """One batch of the data ledger: the how-many-eth `job.batches` loop of the job, and the
    batch's number in it.

    Of a stream also the samples that were found there, and whether the source ends after them
    (core/stream.py).
    """

    loop: int
    number: int
    count: int = 0  # type: ignore[assignment]  # a field hides tuple.count
    end: bool = False


@dataclass(frozen=True, slots=True)
class Staged:
    """A shard holds this push, checked and whole, and waits to be told what to do with it.

    samples weighs the gradient in a round's average; base is the version that it was computed
    from; problem, when not empty, says why the push must not be applied ("NON_FINITE: tensor
    conv1.weight"): then nothing is held. square_norm: sum of the squares of this shard's part of
    the gradient, 0 where nobody looks at norms. mended: the tensor in which this shard put zeros
    for what was not finite, or empty.
    """

    key: PushKey
    samples: int
    base: int
    batches: tuple[BatchKey, ...] = ()
    problem: str = ""
    square_norm: float = 0.0
    mended: str = ""


@dataclass(frozen=True, slots=True)
class Begin:
    """The weights that `worker` uploaded are version 0. Stale: ignored. Too new: the shard asks
    for what it missed.
    """

    index: int
    worker: int


class Contribution(NamedTuple):
    """A push that an Apply counts, what it weighs, and what its gradient is multiplied with."""

    key: PushKey
    samples: int
    base: int
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Apply:
    """Average these pushes, in this order, and step the optimizer once; the result is `version`."""

    index: int
    version: int
    contributions: tuple[Contribution, ...]


@dataclass(frozen=True, slots=True)
class Measure:
    """Measure the average of these pushes, as an Apply of them would make it, and report it.
    Nothing changes.

    With a clip norm, an Apply of several pushes follows such an entry: only all shards together
    know the norm.
    """

    index: int
    contributions: tuple[Contribution, ...]


@dataclass(frozen=True, slots=True)
class Reject:
    """Drop this push and tell its worker why."""

    index: int
    key: PushKey
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Evict:
    """The worker is out: drop what it has staged and answer everything more that it sends with
    FENCED.
    """

    index: int
    worker: int
    reason: str


@dataclass(frozen=True, slots=True)
class Cut:
    """Write a snapshot of exactly this version."""

    index: int
    version: int


@dataclass(frozen=True, slots=True)
class Reshard:
    """From here on the model lies on so many shards. What is staged is void: it was cut for the
    shards before.
    """

    index: int
    version: int
    shards: int


Entry = Begin | Apply | Reject | Evict | Cut | Reshard | Measure


class Measured(NamedTuple):
    """What a shard measured: the index of the Measure, and the sum of squares of its part of the
    average.
    """

    index: int  # type: ignore[assignment]  # a field hides tuple.index
    square_norm: float


@dataclass(frozen=True, slots=True)
class ShardReport:
    """What a shard knows, whole, so that a lost, repeated or late report does no harm.

    epoch: which start of the job's log this is about; index: the last entry of it that the shard
    has carried out. log_bytes: of what the shard has written down since the last cut;
    log_broken: some of it could not be written. digest: of all entries up to the index. moving:
    it does not hold yet what the last Reshard gives it. measured: the answer to the newest
    Measure; None once its pushes have counted, or void.
    """

    shard: int
    epoch: int
    index: int
    staged: tuple[Staged, ...]
    log_bytes: int = 0
    digest: int = 0
    log_broken: bool = False
    moving: bool = False
    measured: Measured | None = None
