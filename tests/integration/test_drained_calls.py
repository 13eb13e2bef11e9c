"""Calls that wait for others end soon after their worker was asked to leave, on each lane."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from psserver.core.workers.collectives import NUMBERED, CallKey
from psworker import Client
from psworker.core.results import CollectiveCall
from psworker.session import drain
from psworker.session.drain import DrainedError
from tests.support.cluster import Cluster
from tests.support.lanes import each_lane
from tests.support.machine_time import machine_seconds
from tests.support.workers import DEADLINE, count, counted, counter, until

Make = Callable[..., Cluster]

SPARE_SECONDS = 1.0
Waits = Callable[[Cluster, Client], bool]


def push_waits(made: Cluster, other: Client) -> bool:
    return bool(made.servers[0].engine.live.state.staged)


def barrier_waits(made: Cluster, other: Client) -> bool:
    """Return whether a barrier waits for the other worker only."""
    service = made.servers[0].service
    assert service is not None
    missing = service.executor.coordinator.collectives.missing(CallKey(NUMBERED, 1))
    return [member.worker for member in missing] == [other.worker]


CALLS: dict[str, tuple[Callable[[Client], object], Waits]] = {
    "a push": (count, push_waits),
    "a barrier": (lambda client: client.collective(1, CollectiveCall("barrier"), 0), barrier_waits),
}


@pytest.mark.every(2)
@each_lane
@pytest.mark.parametrize("call", CALLS)
def test_a_call_of_a_drained_worker_ends_and_the_job_goes_on(
    cluster: Make, monkeypatch: pytest.MonkeyPatch, lanes: Any, call: str
) -> None:
    monkeypatch.setattr(drain, "MAX_WAIT_SECONDS", 0.3)
    (make, waits), made, errors = CALLS[call], cluster(1), []
    with counter(made.address, lanes=lanes) as other:

        def wait(client: Client) -> None:
            try:
                make(client)
            except DrainedError as error:
                errors.append(error)

        with counter(made.address, lanes=lanes) as client:
            waiting = threading.Thread(target=wait, args=(client,))
            waiting.start()
            until(lambda: waits(made, other), "a call that waits")
            client.drain()
            began = time.monotonic()
            waiting.join(DEADLINE)
            took = machine_seconds(began)

        assert len(errors) == 1
        assert took <= drain.MAX_WAIT_SECONDS + SPARE_SECONDS
        count(other)
        assert counted(other.pull()) == 1
