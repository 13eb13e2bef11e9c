"""Ends the calls of a worker that was asked to leave when a server does not answer."""

import time
from collections.abc import Callable

from psworker.connection.retry import PendingRequests
from psworker.session.drain import Drain
from psworker.transport.interface import Transport

POLL_SECONDS = 0.1
UNANSWERED_SECONDS = 0.75
"""Age of a call in flight at which the servers are probed."""
PROBE_SECONDS = 0.75


def end_unanswered(
    transport: Transport, drain: Drain, waits: PendingRequests, has_ended: Callable[[], bool]
) -> None:
    """Watch the script's calls until `has_ended` is true; run in a thread of its own.

    When a server does not answer a probe, all calls end and the drain gives up. A call to servers
    that answer may take any time.
    """
    since = time.monotonic()
    while not has_ended():
        time.sleep(POLL_SECONDS)
        now = time.monotonic()
        if not waits.open:
            if now >= drain.deadline:  # before the deadline a failed call may be repeated soon
                since = now
        elif now - since >= UNANSWERED_SECONDS and now >= drain.deadline - UNANSWERED_SECONDS:
            if not transport.answers(PROBE_SECONDS) and waits.open:
                drain.give_up()
                transport.end_calls()
                return
            since = time.monotonic()
