"""Every way to fail that a user can meet: one exception class per remedy, one row per reason."""

from typing import ClassVar, NamedTuple


class PSError(Exception):
    """Base of all errors of this system. `reason` is stable and machine-readable, the text is
    for people.
    """

    exit_code: ClassVar[int] = 1
    reason: str

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason or DEFAULT_REASON.get(type(self), "INTERNAL")


class InvalidRequestError(PSError):
    """The call itself is wrong: unknown tensor, shape, dtype, setting. Change the call;
    repeating it cannot help.
    """

    exit_code = 2


class UnsupportedOptimizerError(InvalidRequestError):
    """The servers cannot run this optimizer; the message lists those they can."""


class TakenError(PSError):
    """A port, data directory or shard belongs to somebody else."""

    exit_code = 10


class MismatchError(PSError):
    """Two sides disagree on shard, job, model, optimizer or data; the message shows the
    difference.
    """

    exit_code = 11


class FencedError(PSError):
    """The job went on without this worker (its lease ended, or the servers went back to a
    snapshot).

    Connect again, or start the worker again, to come back as new.
    """

    exit_code = 20


class QuarantinedError(FencedError):
    """Too many of this worker's gradients in a row were bad; the message names them. Starting it
    again cannot help.
    """

    exit_code = 14


class SnapshotError(PSError):
    """No snapshot could be loaded, or one is damaged; the message names the file and what is
    wrong with it.
    """

    exit_code = 12


class FormatError(MismatchError, SnapshotError):
    """A peer or a file has a newer format than this release knows. Install the newer release of paramserver here."""

    exit_code = 11


class NotSavedError(PSError):
    """The final weights could not be written. Free or repair the disk that the message names."""

    exit_code = 15


class NonFiniteError(PSError):
    """A gradient holds NaN or Inf, or is far too large. Nothing was changed; the message names
    the worker.
    """

    exit_code = 14


class UnreachableError(PSError):
    """No answer from a server before the deadline. Start it or check the address, then try
    again.
    """

    exit_code = 20


class LayoutError(PSError):
    """The model lies on another number of servers by now. Nothing was taken; find them, then
    send it again.
    """

    exit_code = 20


class InFlightError(PSError):
    """A server has no room for a push now (--in-flight). Nothing was taken; the push may be sent
    again in a while.
    """

    exit_code = 20


class WaitTimeoutError(UnreachableError):
    """Everybody answers, but what was waited for did not happen in time; the message names whom
    it waited for.
    """


class TooFewWorkersError(PSError):
    """The job did not get its --min-workers in time, or has lost one under --on-worker-loss
    abort.
    """

    exit_code = 21


class ReasonRow(NamedTuple):
    """How a reason travels: exception class, canonical gRPC status, and whether the same call
    may succeed later.
    """

    error: type[PSError]
    status: str
    retryable: bool
    meaning: str


REASONS: dict[str, ReasonRow] = {
    "INTERNAL": ReasonRow(
        PSError, "INTERNAL", False, "a bug of this system; please report the log"
    ),
    "INVALID_REQUEST": ReasonRow(
        InvalidRequestError, "INVALID_ARGUMENT", False, "the call does not fit the job"
    ),
    "OUT_OF_RANGE": ReasonRow(
        InvalidRequestError, "INVALID_ARGUMENT", False, "a number or size is outside its bounds"
    ),
    "UNKNOWN_TENSOR": ReasonRow(
        InvalidRequestError, "INVALID_ARGUMENT", False, "the model has no such tensor"
    ),
    "WRONG_SHAPE": ReasonRow(
        InvalidRequestError, "INVALID_ARGUMENT", False, "another shape than registered"
    ),
    "WRONG_DTYPE": ReasonRow(
        InvalidRequestError, "INVALID_ARGUMENT", False, "another dtype than registered"
    ),
    "UNSUPPORTED_OPTIMIZER": ReasonRow(
        UnsupportedOptimizerError, "INVALID_ARGUMENT", False, "use one of the listed ones"
    ),
    "TAKEN": ReasonRow(
        TakenError, "ALREADY_EXISTS", False, "choose another port or directory, or stop its holder"
    ),
    "SHARD_TAKEN": ReasonRow(
        MismatchError, "ALREADY_EXISTS", False, "another server already is this shard"
    ),
    "SHARD_MISMATCH": ReasonRow(
        MismatchError,
        "FAILED_PRECONDITION",
        False,
        "not one complete set of servers: give all the same N in --shard I/N, and each I once",
    ),
    "JOB_MISMATCH": ReasonRow(
        MismatchError, "FAILED_PRECONDITION", False, "another job: by --job, or a --data-dir's"
    ),
    "MODEL_MISMATCH": ReasonRow(
        MismatchError,
        "FAILED_PRECONDITION",
        False,
        "workers, and a resumed job, train the same model",
    ),
    "LOOP_MISMATCH": ReasonRow(
        MismatchError,
        "FAILED_PRECONDITION",
        False,
        "workers, and a resumed job, go through the same data; only the last loop can get more "
        "epochs",
    ),
    "FORMAT": ReasonRow(
        FormatError,
        "FAILED_PRECONDITION",
        False,
        "messages or files of a newer release; install that release on every machine of the job",
    ),
    "FENCED": ReasonRow(
        FencedError,
        "FAILED_PRECONDITION",
        False,
        "the job went on without this worker; start it again",
    ),
    "QUARANTINED": ReasonRow(
        QuarantinedError,
        "FAILED_PRECONDITION",
        False,
        "too many bad gradients in a row; look at its data and device",
    ),
    "NO_SNAPSHOT": ReasonRow(
        SnapshotError, "FAILED_PRECONDITION", False, "no valid snapshot where one was asked for"
    ),
    "NOT_SAVED": ReasonRow(
        NotSavedError,
        "FAILED_PRECONDITION",
        False,
        "the final weights are in no snapshot, log or file",
    ),
    "NON_FINITE": ReasonRow(
        NonFiniteError, "FAILED_PRECONDITION", False, "NaN or Inf in a gradient"
    ),
    "OUTLIER": ReasonRow(
        NonFiniteError, "FAILED_PRECONDITION", False, "a gradient's norm is above --max-norm"
    ),
    "UNREACHABLE": ReasonRow(UnreachableError, "UNAVAILABLE", True, "a server does not answer"),
    "NOT_READY": ReasonRow(
        UnreachableError, "UNAVAILABLE", True, "the server is still starting; try again"
    ),
    "NOT_ATTACHED": ReasonRow(
        UnreachableError, "UNAVAILABLE", True, "the server lost this worker's shared memory"
    ),
    "NOT_PRIMARY": ReasonRow(
        UnreachableError, "UNAVAILABLE", True, "another server is primary of this shard"
    ),
    "NOT_IN_SYNC": ReasonRow(
        MismatchError, "FAILED_PRECONDITION", True, "the standby lacks what its primary has told"
    ),
    "DEPOSED": ReasonRow(
        TakenError, "ALREADY_EXISTS", False, "another server has become primary of this shard"
    ),
    "LAYOUT": ReasonRow(
        LayoutError, "FAILED_PRECONDITION", True, "the job has another number of servers by now"
    ),
    "STOPPING": ReasonRow(UnreachableError, "UNAVAILABLE", True, "the server is stopping"),
    "WAIT_TIMEOUT": ReasonRow(
        WaitTimeoutError, "DEADLINE_EXCEEDED", True, "somebody else is late; the message says who"
    ),
    "IN_FLIGHT": ReasonRow(
        InFlightError, "RESOURCE_EXHAUSTED", True, "the server's --in-flight bytes are taken"
    ),
    "TOO_FEW_WORKERS": ReasonRow(
        TooFewWorkersError, "FAILED_PRECONDITION", True, "start more workers"
    ),
}

DEFAULT_REASON: dict[type[PSError], str] = {}
for _reason, _row in REASONS.items():
    DEFAULT_REASON.setdefault(_row.error, _reason)


def error_for(reason: str, message: str) -> PSError:
    """The exception that a reason on the wire stands for; an unknown reason is a bug of the
    other side.
    """
    row = REASONS.get(reason, REASONS["INTERNAL"])
    return row.error(message, reason)


QUARANTINED = "QUARANTINED"
"""How the reason begins for which a worker is out, where it must not come back."""


def out_of_the_job(worker: int, why: str) -> FencedError:
    """What a worker is told whose place is gone, for this reason."""
    error = QuarantinedError if why.startswith(QUARANTINED) else FencedError
    return error(f"worker {worker} is out of the job: {why}")
