"""What servers refuse before they allocate memory: requests above these bounds, and settings of a
policy that do not fit together.

Each bound is far above what a real job needs. None limits the length of a training: the ledger
stores a loop over 10**9 epochs as two numbers.
"""

from pscommon.core.data_stream import Spec, StreamSpec
from pscommon.core.errors import InvalidRequestError

POLICIES = ("sync", "async", "ssp")
"""The policies under which the servers make the steps."""

ALLREDUCE = "allreduce"
"""The policy under which workers keep the weights and reduce the gradients among themselves."""

MAX_BATCHES_PER_REQUEST = 1024
"""Batches in one request for data."""

MAX_BATCHES_PER_PUSH = 65_536
"""Batches that one push commits, or that one request returns."""

MAX_BATCH_NUMBER = 2**63 - 1
"""Largest batch number; the wire format has 64 bits."""

MAX_LOADERS = 10_000
"""Loaders of a script that have begun a pass and can begin another one."""

MAX_LOOPS = 10_000_000
"""Loops of a job: passes of all loaders of a script. Each takes a place in the ledger."""

MAX_LAPS = 2**44
"""Sources x epochs of a stream.

A batch number is place x laps + lap, so a lap may have 2**19 batches.
"""

MAX_SAMPLES_PER_PUSH = 2**48
"""Weight of one gradient in the average of a round."""

WORKERS_PER_GENERATION = 10_000
"""Worker numbers of the n-th start of a job's servers begin after n times this many."""

MAX_RANK = 1_000_000
MAX_ATTEMPT = 1_000_000

MAX_SHARDS = 4096
"""Servers of a job."""

MAX_SHARD_NBYTES = 2**50
"""Bytes of one shard's part of the model, of its file in a snapshot, or of its log."""

MAX_MEMBERS = 100_000
"""Workers in one report of a shard."""

MAX_TENSORS = 100_000
"""Tensors of a model."""

MAX_DIMENSIONS = 64
"""Sides of a tensor's shape; numpy and torch have the same bound."""

MAX_UNGREETED_STREAMS = 1000
"""Connections to a stream port whose peers have not greeted the server yet."""

MAX_REQUEST_STREAMS = 8
"""Streams of a worker for requests to the coordinator. It has one stream for tensors."""

MAX_PUSHES_PER_WORKER = 2
"""Pushes of a worker whose bytes a shard holds: one that is received, one that is not decided."""

MAX_PULLS_PER_WORKER = 1
"""Pulls of a worker whose bytes a shard is sending."""

MAX_NAME_CHARACTERS = 256
"""Characters in the name of a host, device, phase or reported value."""

MAX_REASON_CHARACTERS = 2000
"""Characters in a worker's reason for leaving; a longer text is truncated."""

MAX_METRICS = 1000
"""Names of reported values in a job."""

MAX_REPORTED_VALUES = 10_000
"""Reported values in one request. A worker sends at most one for each of its MAX_METRICS names."""

MAX_COLLECTIVE_VALUES = 256
"""Values of one all_reduce."""

MAX_BROADCAST_NBYTES = 64 * 1024
"""Bytes of the JSON text of one broadcast."""

MAX_SPAN_BATCH_NBYTES = 256 * 1024
"""Bytes of the spans in one message; a process sends one a second while spans are recorded."""

MAX_WAIT_MS = 24 * 3600 * 1000
"""Maximum wait of a request, in milliseconds."""


def loop_problem(spec: Spec) -> str:
    """Return why no ledger can deal the batches of this loop, or an empty string."""
    if isinstance(spec, StreamSpec):
        if spec.laps > MAX_LAPS:
            return f"{spec.sources} sources x {spec.epochs} epochs are above {MAX_LAPS}"
        return ""
    if spec.total > MAX_BATCH_NUMBER:
        return (
            f"{spec.epochs} epochs of {spec.batches_in_epoch} batches are above {MAX_BATCH_NUMBER}"
        )
    return ""


def check_policy(
    policy: str,
    staleness: int | None,
    backup_workers: int = 0,
    global_batch: int | None = None,
) -> None:
    """Check a combination of settings, named like the flags of ps-server.

    Raises:
        InvalidRequestError: They do not fit together.
    """
    if policy not in POLICIES:
        raise InvalidRequestError(
            f"policy {policy!r} is not valid. Try: one of {', '.join(POLICIES)}"
        )
    if policy == "ssp" and staleness is None:
        raise InvalidRequestError(
            "policy ssp needs a bound. Try: `--staleness S`, the number of steps that a worker may "
            "be ahead (0 acts as sync)"
        )
    if policy != "ssp" and staleness is not None:
        raise InvalidRequestError(
            f"policy {policy} excludes `--staleness {staleness}`: it has no bound. Try: policy ssp"
        )
    if staleness is not None and staleness < 0:
        raise InvalidRequestError(f"--staleness {staleness} is not valid. Try: at least 0")
    has_rounds = policy == "sync" or staleness == 0
    if backup_workers and not has_rounds:
        raise InvalidRequestError(
            f"--backup-workers {backup_workers} excludes policy {policy}, which waits for no "
            "worker. Try: policy sync"
        )
    if global_batch is not None and not has_rounds:
        raise InvalidRequestError(
            f"--global-batch {global_batch} excludes policy {policy}, which has no rounds. "
            "Try: policy sync"
        )
    if global_batch is not None and backup_workers:
        raise InvalidRequestError(
            "--global-batch excludes --backup-workers: it needs all gradients of a round. "
            "Try: leave out one of them"
        )


def check_allreduce(**settings: object) -> None:
    """Check the other settings of a job with policy allreduce, by name of the field.

    Its servers see no gradient and write no log: the workers have the weights.

    Raises:
        InvalidRequestError: A setting excludes the policy.
    """
    unseen, unsafe = "the servers see no gradient", "workers exchange gradients in plain text"
    reasons = {
        "staleness": "it has no bound",
        "max_staleness": "its gradients are of the newest weights",
        "backup_workers": "a sum needs the gradients of all workers",
        "global_batch": "each worker reduces one gradient for a step",
        "max_norm": unseen,
        "quarantine_after": unseen,
        "standby_of": "the workers have the weights",
        "tls_cert": unsafe,
        "token_file": unsafe,
    }
    for name, reason in reasons.items():
        value = settings.get(name)
        if value is not None and (value or name != "backup_workers"):  # its default is 0
            raise InvalidRequestError(
                f"policy allreduce excludes `--{name.replace('_', '-')} {value}`: "
                f"{reason}. Try: policy sync"
            )
    for name, value, reason in (
        ("bad_gradients", "clip", unseen),
        ("bad_gradients", "skip", "a sum cannot leave out a gradient"),
        ("durability", "log", "the log would lack the gradients"),
    ):
        if settings.get(name) == value:
            raise InvalidRequestError(
                f"policy allreduce excludes `--{name.replace('_', '-')} {value}`: {reason}. "
                "Try: policy sync"
            )
