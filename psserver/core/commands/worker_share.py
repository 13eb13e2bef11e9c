"""Share of a loop that a worker can expect: what `len()` of a loader returns."""

from pscommon.core.data_stream import Spec, StreamSpec
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.workers.replacement import predecessor


def worker_share(coordinator: CoordinatorMachine, worker: int, spec: Spec) -> int:
    """Return the number of batches of a loop that a worker gets if the membership does not change.

    Under sync it is exact, because the ledger deals in worker order. Under async, ssp and
    --backup-workers it is an even part. Before the first round it assumes --min-workers workers. A
    stream has no length: the result is 0.

    Raises:
        InvalidRequestError: --global-batch does not fit the loop's batch_size.
    """
    if isinstance(spec, StreamSpec):
        return 0
    workers, place = _team(coordinator, worker)
    units = coordinator.job.units(spec)
    if units is None:
        return _part(spec.total, workers, place)
    draws, rest = divmod(spec.batches_in_epoch, units)
    return spec.epochs * (draws * _part(units, workers, place) + _part(rest, workers, place))


def _part(batches: int, workers: int, place: int) -> int:
    return batches // workers + (place < batches % workers)


def _team(coordinator: CoordinatorMachine, worker: int) -> tuple[int, int]:
    """Return the number of workers that share a loop, and the position of this worker."""
    membership = coordinator.membership
    team = membership.registered() if coordinator.started else membership.current()
    member = membership.members.get(worker)
    if member is not None and member.is_current and member not in team:  # it is about to register
        replaced = predecessor(membership.registered(), member)
        team = sorted(
            [*(m for m in team if m is not replaced), member], key=lambda m: (m.rank, m.worker)
        )
    workers = max(len(team), 1 if coordinator.started else coordinator.job.min_workers)
    if member not in team:
        return workers, workers - 1
    assert member is not None
    if not coordinator.started and member.ranked and member.rank < workers:
        return workers, member.rank
    return workers, team.index(member)
