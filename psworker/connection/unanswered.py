"""Ends the calls of a worker that was asked to leave when a server does not answer."""

import time
from collections.abc import Callable

from psworker.connection.retry import PendingRequests
from psworker.session.drain import Drain
from psworker.transport.grpc import Transport

TURN_SECONDS = 0.1
UNANSWERED_SECONDS = 0.75
"""Age of a call in flight at which the servers are probed."""
PROBE_SECONDS = 0.75


def end_unanswered(
    lane: Transport, drain: Drain, waits: PendingRequests, over: Callable[[], bool]
) -> None:
    """Watch the script's calls until `over` is true; run in a thread of its own.

    When a server does not answer a probe, all calls end and the drain gives up. A call to servers
    that answer may take any time.
    """
    since = time.monotonic()
    while not over():
        time.sleep(TURN_SECONDS)
        now = time.monotonic()
        if not waits.any:
            if now >= drain.deadline:  # before the deadline a failed call may be repeated soon
                since = now
        elif now - since >= UNANSWERED_SECONDS and now >= drain.deadline - UNANSWERED_SECONDS:
            if not lane.answers(PROBE_SECONDS) and waits.any:
                drain.give_up()
                lane.end_calls()
                return
            since = time.monotonic()
