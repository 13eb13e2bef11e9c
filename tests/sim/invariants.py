"""Checks of a simulated history, and of each update when the coordinator decides it."""

from pscommon.core.log_entries import Apply, Entry
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.workers.members import WorkerState


class InvariantError(AssertionError):
    """An invariant is violated."""


def violation(message: str, *values: object) -> InvariantError:
    return InvariantError(message.format(*values))


def check(holds: bool, message: str, *values: object) -> None:
    if not holds:
        raise violation(message, *values)


def check_each_update(coordinator: CoordinatorMachine) -> None:
    """Check each Apply when the coordinator appends it to the log."""
    append = coordinator.log.append

    def check_and_append(entry: Entry) -> None:
        if isinstance(entry, Apply):
            check_update(entry, coordinator)
        append(entry)

    coordinator.log.append = check_and_append  # type: ignore[method-assign]


def check_update(apply: Apply, coordinator: CoordinatorMachine) -> None:
    """Check that the policy allows an update."""
    row = coordinator.policy
    active = {m.worker: m.clock for m in coordinator.membership if m.state is WorkerState.ACTIVE}
    counted = [c.key.worker for c in apply.contributions]
    check(
        set(counted) <= set(active),
        "version {} counts workers {}, active are {}",
        apply.version,
        counted,
        active,
    )
    if row.barrier:
        least = max(1, len(active) - row.backup)
        check(
            len(counted) >= least,
            "round {} counts workers {}, active are {}",
            apply.version,
            counted,
            list(active),
        )
    elif row.bound is not None:
        for worker in counted:
            active[worker] += 1
        clocks = list(active.values())
        check(
            max(clocks) - min(clocks) <= row.bound, "clocks {} exceed bound {}", clocks, row.bound
        )
