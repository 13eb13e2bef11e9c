"""Bugs planted in collective calls, as in mutants.py."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from psserver.core.commands.data_commands import CallCollective
from psserver.core.commands.recorded import RecordedCommand
from psserver.core.coordinator.collective_calls import CollectiveCalls, CollectiveRequest
from psserver.core.job.policy import policy
from psserver.core.reports.collectives import Collectives, CollectiveValues
from psserver.core.workers.members import WorkerState
from psserver.durability.coordinator_log import CoordinatorLog
from tests.sim.scenario import Scenario

CALL = CollectiveCalls.call
CONTRIBUTE = Collectives.contribute
WRITE = CoordinatorLog.write


def blocks_rounds(
    calls: CollectiveCalls, request: CollectiveRequest, now: float
) -> CollectiveValues | None:
    """Let rounds wait for a worker that waits in a collective call."""
    result = CALL(calls, request, now)
    member = calls._job.membership.members[request.worker]
    if result is None and member.state is WorkerState.IDLE:
        calls._participation.wake(member)
    return result


def forgets_results(collectives: Collectives) -> dict[str, Any]:
    """Save no results in snapshots, log segments and standbys."""
    return {}


def combines_again(
    collectives: Collectives, worker: int, number: int, values: CollectiveValues
) -> None:
    """Replace the result of a call when a worker that was restarted repeats it."""
    if worker not in collectives.newest:
        collectives.results.pop(number, None)
    CONTRIBUTE(collectives, worker, number, values)


def skips_calls(log: CoordinatorLog, command: RecordedCommand) -> None:
    """Do not write collective calls."""
    if not isinstance(command.command, CallCollective):
        WRITE(log, command)


def restarted_workers(scenario: Scenario) -> Scenario:
    return replace(
        scenario,
        policy=policy("sync"),
        collectives=True,
        workers=3,
        worker_kills=6,
        returns=True,
        server_kills=3,
        durable=True,
        standbys=3,
        lag=False,
    )


SCENARIOS: Mapping[str, Callable[[Scenario], Scenario]] = dict.fromkeys(
    (
        "a waiting worker blocks rounds",
        "results are not saved",
        "a repeated call changes its result",
        "collective calls are not written",
    ),
    restarted_workers,
)
PATCHES: dict[str, tuple[Any, str, Any]] = {
    "a waiting worker blocks rounds": (CollectiveCalls, "call", blocks_rounds),
    "results are not saved": (Collectives, "state", forgets_results),
    "a repeated call changes its result": (Collectives, "contribute", combines_again),
    "collective calls are not written": (CoordinatorLog, "write", skips_calls),
}
