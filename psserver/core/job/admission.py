"""Room for a round: who waits for others keeps its push staged, so the pushes of all workers
must fit at once.
"""

from pscommon.core.errors import InvalidRequestError
from pscommon.core.model_spec import ModelSpec
from pscommon.core.partition import PartitionPlan
from psserver.core.job.coordinator import CoordinatorMachine
from psserver.core.job.policy import Policy


def push_nbytes(spec: ModelSpec, shards: int) -> int:
    """Bytes of a push on the shard that gets most."""
    plan = PartitionPlan(spec, shards)
    return max(
        sum(plan.range(shard, role).nbytes for role in ("trainable", "buffer"))
        for shard in range(shards)
    )


def check_room(coordinator: CoordinatorMachine, worker: int, nbytes: int, in_flight: int) -> None:
    """InvalidRequestError where a round with this worker, which is about to register, would not
    fit --in-flight.

    nbytes: of one push.
    """
    others = [member for member in coordinator.membership.registered() if member.worker != worker]
    _check_round(coordinator.policy, 1 + len(others), nbytes, in_flight)


def check_switch(coordinator: CoordinatorMachine, row: Policy, in_flight: int) -> None:
    """InvalidRequestError where a round of those who are here would not fit --in-flight under
    this policy.
    """
    if coordinator.model is not None:
        workers = len(coordinator.membership.registered())
        _check_round(row, workers, push_nbytes(coordinator.model, coordinator.shards), in_flight)


def check_reshard(coordinator: CoordinatorMachine, shards: int, in_flight: int) -> None:
    """InvalidRequestError where a round of those who are here would not fit --in-flight of so
    many servers.
    """
    if coordinator.model is not None:
        workers = len(coordinator.membership.registered())
        _check_round(coordinator.policy, workers, push_nbytes(coordinator.model, shards), in_flight)


def _check_round(row: Policy, workers: int, nbytes: int, in_flight: int) -> None:
    """In sync and ssp such a round would never close; in async one push need not wait for
    another.

    Pushes through shared memory take no room, but who has it may not be known yet, so all are
    counted.
    """
    workers = workers if row.bound is not None else 1
    needed = workers * nbytes
    if needed > in_flight:
        raise InvalidRequestError(
            f"a round of {workers} workers has {needed} bytes in flight on a server, over "
            f"--in-flight {in_flight}: "
            f"start the servers with --in-flight {needed}, or more servers, or fewer workers"
        )


LOG_BYTES, LOG_PER_MODEL = 64 << 20, 8
"""A shard's log since the last snapshot may grow to the larger of the two, the second times its
part of the model.
"""


def is_full(coordinator: CoordinatorMachine, log_bytes: int) -> bool:
    """Restarts must not take long, nor disks fill up: is it time for a snapshot, which makes the
    log superfluous?
    """
    if coordinator.model is None or coordinator.cuts.busy or log_bytes <= LOG_BYTES:
        return False
    return (
        log_bytes
        > LOG_PER_MODEL
        * sum(tensor.nbytes for tensor in coordinator.model.tensors)
        / coordinator.shards
    )
