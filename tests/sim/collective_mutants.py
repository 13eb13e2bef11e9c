"""Planted bugs in collective calls; see mutants.py."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from psserver.core.commands.command import Command
from psserver.core.commands.data_commands import CallCollective
from psserver.core.coordinator.collective_calls import CollectiveCalls, CollectiveRequest
from psserver.core.job.policy import policy
from psserver.core.workers import collectives as collectives_module
from psserver.core.workers.collectives import CallKey, Collectives, CollectiveValues
from psserver.core.workers.members import Member, WorkerState
from psserver.durability.coordinator_log import CoordinatorLog
from tests.sim.scenario import Scenario

CALL = CollectiveCalls.call
CONTRIBUTE = Collectives.contribute
COMBINED = collectives_module._combined
WRITE = CoordinatorLog.write


def block_rounds(
    calls: CollectiveCalls, request: CollectiveRequest, now: float
) -> CollectiveValues | None:
    """Make rounds wait for a worker that waits in a collective call."""
    result = CALL(calls, request, now)
    member = calls._job.membership.members[request.worker]
    if result is None and member.state is WorkerState.IDLE:
        calls._participation.wake(member)
    return result


def omit_results(collectives: Collectives) -> dict[str, Any]:
    """Leave the results out of snapshots, log segments and the state of standbys."""
    return {}


def replace_result(
    collectives: Collectives, worker: int, key: CallKey, values: CollectiveValues
) -> None:
    """Replace the result of a call when a restarted worker repeats the call."""
    if worker not in collectives.newest:
        collectives.results.pop(key, None)
    CONTRIBUTE(collectives, worker, key, values)


def omit_calls(log: CoordinatorLog, command: Command[object], now: float) -> None:
    """Do not write collective calls to the log."""
    if not isinstance(command, CallCollective):
        WRITE(log, command, now)


def wait_for_none(
    collectives: Collectives, key: CallKey, members: Sequence[Member]
) -> list[Member]:
    """Give each call a result at once."""
    return []


def combine_in_reverse(given: Sequence[CollectiveValues]) -> CollectiveValues:
    """Sum values, and take the first value of a broadcast, from the last worker on."""
    return COMBINED(given[::-1])


def ignore_samples(given: Sequence[CollectiveValues]) -> CollectiveValues:
    """Give all workers the same weight."""
    return COMBINED([each._replace(samples=1) for each in given])


def with_restarted_workers(scenario: Scenario) -> Scenario:
    return replace(
        scenario,
        policy=policy("sync"),
        collectives=True,
        workers=3,
        worker_kills=6,
        restarts_workers=True,
        server_kills=3,
        has_log=True,
        standbys=3,
        has_lagging_standbys=False,
    )


SCENARIOS: Mapping[str, Callable[[Scenario], Scenario]] = dict.fromkeys(
    (
        "a waiting worker blocks rounds",
        "results of collective calls are not saved",
        "a repeated collective call changes its result",
        "collective calls are not written",
        "a collective call waits for no worker",
        "values are combined in reverse order",
        "samples of values are ignored",
    ),
    with_restarted_workers,
)
PATCHES: dict[str, tuple[Any, str, Any]] = {
    "a waiting worker blocks rounds": (CollectiveCalls, "call", block_rounds),
    "results of collective calls are not saved": (Collectives, "state", omit_results),
    "a repeated collective call changes its result": (Collectives, "contribute", replace_result),
    "collective calls are not written": (CoordinatorLog, "write", omit_calls),
    "a collective call waits for no worker": (Collectives, "missing", wait_for_none),
    "values are combined in reverse order": (collectives_module, "_combined", combine_in_reverse),
    "samples of values are ignored": (collectives_module, "_combined", ignore_samples),
}
