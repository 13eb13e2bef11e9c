"""Entries of the job's log: the totally ordered decisions that every shard applies.

The coordinator on shard 0 appends entries, each shard applies them in order, and nothing else
changes a weight. An Apply is appended only after every shard has reported that it staged its
part of the push. So a gradient counts on all shards or on none, and version v is the same sum of
pushes everywhere.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple


class PushKey(NamedTuple):
    """Unique key of a push.

    worker: number of the worker.
    seq: sequence number of the push, from 1; 0 is the worker's upload of initial weights.
    """

    worker: int
    seq: int


class BatchKey(NamedTuple):
    """One batch of the data ledger.

    loop: number of the `job.batches` loop.
    number: number of the batch in its loop.
    count: for a stream: samples found in the batch.
    end: for a stream: whether the source ends after these samples (data_stream.py).
    """

    loop: int
    number: int
    count: int = 0  # type: ignore[assignment]  # a field hides tuple.count
    end: bool = False


@dataclass(frozen=True, slots=True)
class Staged:
    """Report that a shard has a complete, checked push and waits for the decision on it.

    key: the push.
    samples: weight of the gradient in a round's average; 0: the push has buffers only.
    base: version that the gradient was computed from.
    batches: batches that the push commits.
    problem: why the push must not be applied ("NON_FINITE: tensor conv1.weight"), or empty. With a
        problem the shard keeps no data.
    square_norm: sum of squares of this shard's part of the gradient; 0 if norms are not needed.
    mended: name of the tensor in which this shard replaced NaN or Inf by zeros, or empty.
    optimizer: name of the optimizer whose step this is; empty if the job has one without a name.
    reduce_round: number of the reduce round whose sum its worker has (policy allreduce); 0: none.
        The push has no bytes, and an update of it changes nothing on a shard.
    upload: it has the weights of version `base` and the optimizer state, which only workers have
        (policy allreduce), and no samples.
    """

    key: PushKey
    samples: int
    base: int
    batches: tuple[BatchKey, ...] = ()
    problem: str = ""
    square_norm: float = 0.0
    mended: str = ""
    optimizer: str = ""
    reduce_round: int = 0
    upload: bool = False


@dataclass(frozen=True, slots=True)
class Begin:
    """Make the weights that `worker` uploaded version 0."""

    index: int
    worker: int


class Contribution(NamedTuple):
    """A push that an Apply counts.

    key: the push.
    samples: its weight in the average.
    base: version that the gradient was computed from.
    scale: factor of its gradient.
    """

    key: PushKey
    samples: int
    base: int
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Apply:
    """Average these pushes, in this order, and step their optimizer once; the result is `version`.

    All pushes of one Apply belong to one optimizer.
    """

    index: int
    version: int
    contributions: tuple[Contribution, ...]


@dataclass(frozen=True, slots=True)
class Measure:
    """Report the norm of the average that an Apply of these pushes would use; change nothing.

    With a clip norm, an Apply of several pushes follows such an entry: the norm needs the sums of
    squares of all shards.
    """

    index: int
    contributions: tuple[Contribution, ...]


@dataclass(frozen=True, slots=True)
class SetBuffers:
    """Take the buffers without an average from a push of buffers only; the version stays.

    Of an upload (Staged.upload), take the weights and the optimizer state.

    Such a buffer that a script changes after a step, like the weights of an averaged teacher,
    belongs to the version that the step has made.
    """

    index: int
    key: PushKey


@dataclass(frozen=True, slots=True)
class Reject:
    """Drop this push and report the reason to its worker."""

    index: int
    key: PushKey
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Evict:
    """Fence the worker: drop its staged pushes, and answer all its later requests with FENCED."""

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
    """Distribute the model to `shards` shards.

    Staged pushes are void: they are partitioned for the previous number of shards.
    """

    index: int
    version: int
    shards: int


Entry = Begin | Apply | Reject | Evict | Cut | Reshard | Measure | SetBuffers


class Measured(NamedTuple):
    """A shard's answer to a Measure.

    index: index of the Measure.
    square_norm: sum of squares of the shard's part of the average.
    """

    index: int  # type: ignore[assignment]  # a field hides tuple.index
    square_norm: float


@dataclass(frozen=True, slots=True)
class ShardReport:
    """Report of what a shard has.

    A shard sends a complete one when it connects and once a second, so that lost, repeated or late
    reports are harmless. The others have only new pushes: otherwise they would cost more with each
    worker.

    shard: number of the shard.
    log_id: id of the log that the shard follows; every start and rollback begins a new log.
    index: last entry that the shard has applied.
    staged: staged pushes; in a report that is not complete those that no report before it had.
    log_bytes: size of the shard's log since the last cut, in bytes.
    digest: digest of all entries up to `index`.
    log_broken: some of the log could not be written.
    is_resharding: the shard does not have the part that the last Reshard assigned to it yet.
    measured: the answer to the newest Measure; None once its pushes have counted or are void.
    """

    shard: int
    log_id: int
    index: int
    staged: tuple[Staged, ...]
    log_bytes: int = 0
    digest: int = 0
    log_broken: bool = False
    is_resharding: bool = False
    measured: Measured | None = None


NORM_EPSILON = 1e-6
"""What torch adds to the norm."""


def clip_factor(clip_norm: float, square_norm: float) -> float:
    """Return the factor for a gradient of this sum of squares: torch's clip_coef, at most 1.0."""
    return min(1.0, clip_norm / (math.sqrt(square_norm) + NORM_EPSILON))
