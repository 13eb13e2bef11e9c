"""Checks of a simulated history, and of each decision of the coordinator when it is made."""

import json
from collections.abc import Iterable, Mapping, Sequence

from pscommon.core.log_entries import Apply, Entry
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.workers.collectives import CollectiveValues
from psserver.core.workers.members import Member, WorkerState


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
    remaining: list[list[int]] = []  # workers of the other updates of the same round

    def check_and_append(entry: Entry) -> None:
        if remaining:
            check(
                isinstance(entry, Apply) and workers_of(entry) == remaining.pop(0),
                "{} comes before the end of a round",
                entry,
            )
        elif isinstance(entry, Apply):
            remaining.extend(check_update(entry, coordinator))
        append(entry)

    coordinator.log.append = check_and_append  # type: ignore[method-assign]


def workers_of(apply: Apply) -> list[int]:
    return [contribution.key.worker for contribution in apply.contributions]


def check_update(apply: Apply, coordinator: CoordinatorMachine) -> list[list[int]]:
    """Check that the policy allows the first update of a round.

    Returns:
        The workers of each further update that the round must make.
    """
    job_policy = coordinator.job.policy
    active = {m.worker: m.clock for m in coordinator.membership if m.state is WorkerState.ACTIVE}
    counted = workers_of(apply)
    check(
        set(counted) <= set(active),
        "version {} counts workers {}, active are {}",
        apply.version,
        counted,
        active,
    )
    if job_policy.name == "allreduce":
        workers = [*coordinator.job.reduction.open.workers]
        check(counted == workers, "version {} counts {} of {}", apply.version, counted, workers)
        return []
    if job_policy.barrier:
        least = max(1, len(active) - job_policy.backup)
        first, *others = workers_of_round(coordinator, active)
        ready = coordinator.pending.ready.by_worker.keys() & active.keys()
        check(
            counted == first and len(ready) >= least,
            "round {} counts workers {}, ready are {}, active are {}",
            apply.version,
            counted,
            ready,
            list(active),
        )
        return others
    if job_policy.bound is not None:
        for worker in counted:
            active[worker] += 1
        clocks = list(active.values())
        check(
            max(clocks) - min(clocks) <= job_policy.bound,
            "clocks {} exceed bound {}",
            clocks,
            job_policy.bound,
        )
    return []


def workers_of_round(coordinator: CoordinatorMachine, active: Iterable[int]) -> list[list[int]]:
    """Return the workers of a round, in a list for each optimizer of their pushes.

    A worker that begins a batch waits while another one is within a batch.
    """
    ready, found = coordinator.pending.ready, dict[str, list[int]]()
    keys = [
        min(key for key in ready if key.worker == worker)
        for worker in active
        if worker in coordinator.pending.ready.by_worker
    ]
    within = [key for key in keys if ready[key].optimizer and not ready[key].batches]
    may_wait = coordinator.job.policy.age_limit is None
    for key in within if within and may_wait else keys:
        found.setdefault(ready[key].optimizer, []).append(key.worker)
    return list(found.values())


def check_each_collective(
    coordinator: CoordinatorMachine, calls: Mapping[tuple[int, int], CollectiveValues]
) -> None:
    """Check each result of a collective call when the coordinator has it.

    calls: What each worker has passed to each call, by worker and number.
    """
    collectives = coordinator.job.collectives
    finish = collectives.finish

    def finish_and_check(members: Sequence[Member]) -> list[int]:
        before, contributors = (
            set(collectives.results),
            {key: set(contributions) for key, contributions in collectives.open.items()},
        )
        served = finish(members)
        for key in collectives.results.keys() - before:
            found = collectives.results[key]
            check_collective(key.number, found, members, contributors[key], calls)
        return served

    collectives.finish = finish_and_check  # type: ignore[method-assign]


def check_collective(
    number: int,
    found: CollectiveValues,
    members: Sequence[Member],
    contributors: set[int],
    calls: Mapping[tuple[int, int], CollectiveValues],
) -> None:
    """Check the value of a call, and that it has waited for all members that count."""
    newest = {worker: max(n for w, n in calls if w == worker) for worker, _ in calls}
    ordered = sorted(members, key=lambda member: (member.rank, member.worker))
    given = [calls[member.worker, number] for member in ordered if member.worker in contributors]
    texts = [json.loads(each.text) for each in given]
    text = next((each for each in texts if each is not None), None)
    for member in ordered:
        own = calls.get((member.worker, number)) if member.worker in contributors else None
        if text is not None and own is not None and json.loads(own.text) == text:
            break  # a broadcast needs no workers after this one
        check(
            newest.get(member.worker, 0) >= number,
            "collective call {} has a result without worker {}",
            number,
            member.worker,
        )
    total = sum(each.samples for each in given)
    means = [sum(each.values[0] * (each.samples / total) for each in given if each.values)]
    expected = (tuple(means if found.names else ()), text)
    result = (found.values, json.loads(found.text))
    check(result == expected, "collective call {} gives {}, not {}", number, result, expected)
