"""What the simulated machines must never do."""

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


def watch(coordinator: CoordinatorMachine) -> None:
    """Check each decision when it is made."""
    append = coordinator.log.append

    def watched(entry: Entry) -> None:
        if isinstance(entry, Apply):
            check_decision(entry, coordinator)
        append(entry)

    coordinator.log.append = watched  # type: ignore[method-assign]


def check_decision(apply: Apply, coordinator: CoordinatorMachine) -> None:
    """Check that an update is one that the policy allows."""
    row = coordinator.policy
    active = {m.worker: m.clock for m in coordinator.membership if m.state is WorkerState.ACTIVE}
    counted = [c.key.worker for c in apply.contributions]
    check(
        set(counted) <= set(active),
        "version {} counts workers {} of {}",
        apply.version,
        counted,
        active,
    )
    if row.barrier:
        least = max(1, len(active) - row.backup)
        check(len(counted) >= least, "round {} has {} of {}", apply.version, counted, list(active))
    elif row.bound is not None:
        for worker in counted:
            active[worker] += 1
        clocks = list(active.values())
        check(max(clocks) - min(clocks) <= row.bound, "clocks {} at bound {}", clocks, row.bound)
