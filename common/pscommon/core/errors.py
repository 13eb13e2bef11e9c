"""Error catalogue: one exception class per remedy, one row per reason."""

from typing import ClassVar, NamedTuple


class PSError(Exception):
    """Base class of all errors of this system.

    Attributes:
        reason: stable, machine-readable code; the message is for people.
    """

    exit_code: ClassVar[int] = 1
    reason: str

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason or DEFAULT_REASON.get(type(self), "INTERNAL")


class InvalidRequestError(PSError):
    """The request is invalid: unknown tensor, wrong shape, dtype or setting.

    Correct the request; repeating it cannot help.
    """

    exit_code = 2


class UnsupportedOptimizerError(InvalidRequestError):
    """The servers do not support this optimizer; the message lists the supported ones."""


class TakenError(PSError):
    """Another process uses this port, data directory or shard."""

    exit_code = 10


class MismatchError(PSError):
    """Two processes disagree on shard, job, model, optimizer or data; the message shows where."""

    exit_code = 11


class TrainingOver(MismatchError):
    """The training that a script named is over: the job has gone on to a later one.

    A script that is started again catches this, and goes on with its next training.
    """


class FencedError(PSError):
    """The worker is no longer a member of the job: its lease expired, or the servers rolled back.

    Connect again or restart the worker; it joins as a new worker.
    """

    exit_code = 20


class QuarantinedError(FencedError):
    """The worker sent too many bad gradients in a row; the message names them.

    A restart does not help.
    """

    exit_code = 14


class SnapshotError(PSError):
    """No snapshot could be loaded, or one is damaged; the message names the file and the damage."""

    exit_code = 12


class FormatError(MismatchError, SnapshotError):
    """A peer has another format than this release, or a file a newer one.

    Install the newer release of paramserver on both sides.
    """

    exit_code = 11


class AuthenticationError(PSError):
    """A peer refused this process's certificate, token or worker key, or one is out of date.

    Correct the file that the message names; repeating the request cannot help.
    """

    exit_code = 13


class NotSavedError(PSError):
    """The final weights could not be written. Free or repair the disk that the message names."""

    exit_code = 15


class NonFiniteError(PSError):
    """A gradient contains NaN or Inf, or its norm is too large.

    The weights are unchanged; the message names the worker.
    """

    exit_code = 14


class UnreachableError(PSError):
    """A server did not answer before the deadline.

    Start it or correct the address, then try again.
    """

    exit_code = 20


class LayoutError(PSError):
    """The number of shards has changed.

    The request had no effect; discover the servers and send it again.
    """

    exit_code = 20


class InFlightError(PSError):
    """A server has no memory for this push (--in-flight).

    The request had no effect; send it again later.
    """

    exit_code = 20


class WaitTimeoutError(UnreachableError):
    """All servers answer, but an awaited event did not happen in time; the message names it."""


class TooFewWorkersError(PSError):
    """The job has fewer workers than required.

    --min-workers did not join in time, or a worker was lost under --on-worker-loss abort.
    """

    exit_code = 21


class ReasonRow(NamedTuple):
    """How a reason is transmitted.

    Attributes:
        error: exception class.
        meaning: explanation for people.
        status: canonical gRPC status.
        retryable: whether the same request may succeed later.
    """

    error: type[PSError]
    meaning: str
    status: str = "FAILED_PRECONDITION"
    retryable: bool = False


REASONS: dict[str, ReasonRow] = {
    "INTERNAL": ReasonRow(PSError, "bug in this system; report it with the log", "INTERNAL"),
    "INVALID_REQUEST": ReasonRow(
        InvalidRequestError, "the request does not fit the job", "INVALID_ARGUMENT"
    ),
    "OUT_OF_RANGE": ReasonRow(
        InvalidRequestError, "a number or size is out of range", "INVALID_ARGUMENT"
    ),
    "UNKNOWN_TENSOR": ReasonRow(
        InvalidRequestError, "the model has no tensor with this name", "INVALID_ARGUMENT"
    ),
    "WRONG_SHAPE": ReasonRow(
        InvalidRequestError, "the shape differs from the registered shape", "INVALID_ARGUMENT"
    ),
    "WRONG_DTYPE": ReasonRow(
        InvalidRequestError, "the dtype differs from the registered dtype", "INVALID_ARGUMENT"
    ),
    "UNSUPPORTED_OPTIMIZER": ReasonRow(
        UnsupportedOptimizerError,
        "the servers do not support this optimizer; use one of those listed",
        "INVALID_ARGUMENT",
    ),
    "TAKEN": ReasonRow(
        TakenError,
        "another process uses this port or directory; choose another one or stop that process",
        "ALREADY_EXISTS",
    ),
    "SHARD_TAKEN": ReasonRow(
        MismatchError, "another server already serves this shard", "ALREADY_EXISTS"
    ),
    "SHARD_MISMATCH": ReasonRow(
        MismatchError,
        "the servers are not one complete set; start each shard I once, "
        "with the same N in --shard I/N",
    ),
    "JOB_MISMATCH": ReasonRow(
        MismatchError, "the job name does not match; compare --job and the job stored in --data-dir"
    ),
    "MODEL_MISMATCH": ReasonRow(
        MismatchError, "the models differ; all workers and a resumed job must train the same model"
    ),
    "LOOP_MISMATCH": ReasonRow(
        MismatchError,
        "the data loops differ; workers and a resumed job must use the same data; "
        "only the last loop may get more epochs",
    ),
    "COLLECTIVE_MISMATCH": ReasonRow(
        MismatchError,
        "the workers make different collective calls; all scripts must make the same calls in the "
        "same order",
    ),
    "TRAINING_OVER": ReasonRow(
        TrainingOver,
        "the script's training is over; catch psworker.TrainingOver and go on with the next one",
    ),
    "FORMAT": ReasonRow(
        FormatError,
        "messages or files of a newer release; install that release on every machine of the job",
    ),
    "FENCED": ReasonRow(FencedError, "the worker is no longer a member of the job; restart it"),
    "QUARANTINED": ReasonRow(
        QuarantinedError,
        "the worker sent too many bad gradients in a row; check its data and device",
    ),
    "NO_SNAPSHOT": ReasonRow(SnapshotError, "there is no valid snapshot to load"),
    "UNAUTHENTICATED": ReasonRow(
        AuthenticationError,
        "a certificate, token or worker key is missing, wrong or out of date; correct --tls-cert "
        "or --token-file, or start the worker again",
        "UNAUTHENTICATED",
    ),
    "PERMISSION_DENIED": ReasonRow(
        AuthenticationError,
        "the role of the token does not allow the request; use a token of the role in the message",
        "PERMISSION_DENIED",
    ),
    "NOT_SAVED": ReasonRow(NotSavedError, "the final weights are in no snapshot, log or file"),
    "NON_FINITE": ReasonRow(NonFiniteError, "a gradient contains NaN or Inf"),
    "OUTLIER": ReasonRow(NonFiniteError, "the norm of a gradient is above --max-norm"),
    "UNREACHABLE": ReasonRow(
        UnreachableError, "a server does not answer", "UNAVAILABLE", retryable=True
    ),
    "NOT_READY": ReasonRow(
        UnreachableError, "the server is starting; try again", "UNAVAILABLE", retryable=True
    ),
    "NOT_ATTACHED": ReasonRow(
        UnreachableError,
        "the server lost the worker's shared memory",
        "UNAVAILABLE",
        retryable=True,
    ),
    "NOT_PRIMARY": ReasonRow(
        UnreachableError,
        "another server is the primary of this shard",
        "UNAVAILABLE",
        retryable=True,
    ),
    "NOT_IN_SYNC": ReasonRow(MismatchError, "the standby is behind its primary", retryable=True),
    "DEPOSED": ReasonRow(
        TakenError, "another server has become the primary of this shard", "ALREADY_EXISTS"
    ),
    "LAYOUT": ReasonRow(LayoutError, "the number of shards has changed", retryable=True),
    "STOPPING": ReasonRow(
        UnreachableError, "the server is stopping", "UNAVAILABLE", retryable=True
    ),
    "WAIT_TIMEOUT": ReasonRow(
        WaitTimeoutError,
        "an awaited event did not happen in time; the message names what is missing",
        "DEADLINE_EXCEEDED",
        retryable=True,
    ),
    "IN_FLIGHT": ReasonRow(
        InFlightError,
        "the server's --in-flight memory is in use; try again later",
        "RESOURCE_EXHAUSTED",
        retryable=True,
    ),
    "TOO_FEW_WORKERS": ReasonRow(
        TooFewWorkersError, "the job has too few workers; start more", retryable=True
    ),
}

DEFAULT_REASON: dict[type[PSError], str] = {}
for _reason, _row in REASONS.items():
    DEFAULT_REASON.setdefault(_row.error, _reason)


def error_for(reason: str, message: str) -> PSError:
    """Return the exception for a reason received from a peer; an unknown reason is INTERNAL."""
    row = REASONS.get(reason, REASONS["INTERNAL"])
    return row.error(message, reason)


QUARANTINED = "QUARANTINED"
"""Prefix of a fence reason that forbids the worker to rejoin."""


def out_of_the_job(worker: int, why: str) -> FencedError:
    """Return the error for a worker that is no longer a member of the job."""
    error = QuarantinedError if why.startswith(QUARANTINED) else FencedError
    return error(f"worker {worker} is no longer a member of the job: {why}")
