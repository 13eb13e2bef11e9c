"""Admission: the pushes of one round must fit into the servers' memory for pushes.

A worker that waits for others keeps its push staged, so the pushes of all workers are in memory
at the same time.
"""

from pscommon.core.errors import InvalidRequestError
from pscommon.core.limits import ALLREDUCE
from pscommon.core.model_spec import ROLES, ModelSpec
from pscommon.core.partition import PartitionPlan
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.job.policy import Policy


def push_nbytes(spec: ModelSpec, shards: int) -> int:
    """Return the bytes of a push on the shard with the largest part."""
    plan = PartitionPlan(spec, shards)
    return max(
        sum(plan.range(shard, role).nbytes for role in ("trainable", "buffer"))
        for shard in range(shards)
    )


def largest_push_nbytes(policy: Policy, spec: ModelSpec, shards: int, states: int) -> int:
    """Return the bytes of the largest push on the shard with the largest part.

    Under allreduce it is an upload of weights and optimizer state.

    states: Number of states per weight.
    """
    if policy.name != ALLREDUCE:
        return push_nbytes(spec, shards)
    plan = PartitionPlan(spec, shards)
    return max(
        sum(plan.range(shard, role).nbytes for role in ROLES)
        + states * plan.range(shard, "trainable").nbytes
        for shard in range(shards)
    )


def check_registration(
    coordinator: CoordinatorMachine, worker: int, nbytes: int, in_flight: int
) -> None:
    """Check that a round with a registering worker fits --in-flight.

    Args:
        coordinator: The coordinator.
        worker: The worker.
        nbytes: Bytes of its largest push.
        in_flight: Limit in bytes.

    Raises:
        InvalidRequestError: It does not.
    """
    others = [member for member in coordinator.membership.registered() if member.worker != worker]
    _check_round(coordinator.job.policy, 1 + len(others), nbytes, in_flight)


def check_switch(coordinator: CoordinatorMachine, policy: Policy, in_flight: int) -> None:
    """Raise InvalidRequestError for a switch to or from policy allreduce, and if a round under
    another policy does not fit --in-flight.
    """
    before = coordinator.job.policy
    if before.name != policy.name and "allreduce" in (before.name, policy.name):
        raise InvalidRequestError(
            f"policy {policy.name} refused: the job began with {before.name}, and allreduce keeps "
            f"weights in other places. Try: restart the servers with `--policy {policy.name}`"
        )
    if coordinator.job.model is not None:
        workers = len(coordinator.membership.registered())
        _check_round(
            policy, workers, push_nbytes(coordinator.job.model, coordinator.job.shards), in_flight
        )


def check_reshard(coordinator: CoordinatorMachine, shards: int, in_flight: int) -> None:
    """Raise InvalidRequestError if the job's policy excludes a reshard, or if a round on `shards`
    servers does not fit --in-flight.
    """
    if coordinator.job.policy.name == ALLREDUCE:
        raise InvalidRequestError(
            "reshard refused: policy allreduce keeps the weights in the workers. Try: start the "
            "job with another number of servers"
        )
    if coordinator.job.model is not None:
        workers = len(coordinator.membership.registered())
        _check_round(
            coordinator.job.policy, workers, push_nbytes(coordinator.job.model, shards), in_flight
        )


def _check_round(policy: Policy, workers: int, nbytes: int, in_flight: int) -> None:
    """Raise InvalidRequestError if the pushes of a round do not fit.

    Under sync and ssp such a round would never close; under async no push waits for another, and
    under allreduce only uploads have bytes, of one worker. Pushes through shared memory need no
    such memory, but it may not be known yet which workers use it, so all are counted.
    """
    workers = 1 if policy.bound is None or policy.name == ALLREDUCE else workers
    needed = workers * nbytes
    if needed > in_flight:
        raise InvalidRequestError(
            f"--in-flight {in_flight} is too small: a round of {workers} workers has {needed} "
            f"bytes in flight on a server. Try: `--in-flight {needed}`, more servers, or fewer "
            "workers"
        )


MIN_LOG_BYTES, MAX_LOG_TO_MODEL_RATIO = 64 << 20, 8
"""A shard's log since the last snapshot may grow to the larger of MIN_LOG_BYTES and this multiple
of the shard's part of the model.
"""


def is_full(coordinator: CoordinatorMachine, log_bytes: int) -> bool:
    """Return whether a log is so long that a snapshot is due, which makes the log superfluous.

    It bounds the time of a restart and the use of the disk.
    """
    if log_bytes <= MIN_LOG_BYTES or coordinator.job.model is None or coordinator.cuts.busy:
        return False
    return (
        log_bytes
        > MAX_LOG_TO_MODEL_RATIO
        * sum(tensor.nbytes for tensor in coordinator.job.model.tensors)
        / coordinator.job.shards
    )
