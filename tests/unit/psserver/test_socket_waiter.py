"""An action in a thread, whose stream ends meanwhile."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from psserver.sockets.event_loop import SocketWaiter

SECONDS = 10.0


async def cancel_twice(pool: ThreadPoolExecutor, problem: Exception | None) -> list[str]:
    """Cancel the wait for an action twice before it ends; return what was abandoned."""
    has_begun, may_end = threading.Event(), threading.Event()

    def act() -> str:
        has_begun.set()
        may_end.wait(SECONDS)
        if problem is not None:
            raise problem
        return "memory"

    service: Any = SimpleNamespace(engine=SimpleNamespace(is_quick=False), pool=pool)
    abandoned = list[str]()
    task = asyncio.create_task(SocketWaiter(service).do(act, abandoned.append))
    await asyncio.get_running_loop().run_in_executor(None, has_begun.wait)
    for _ in range(2):
        task.cancel()
        await asyncio.wait([task], timeout=0.01)
        assert not task.done()
    may_end.set()
    await asyncio.wait([task], timeout=SECONDS)
    assert task.cancelled()
    return abandoned


def run(problem: Exception | None) -> list[str]:
    with ThreadPoolExecutor(1) as pool:
        return asyncio.run(cancel_twice(pool, problem))


def test_what_an_abandoned_action_returns_is_given_back() -> None:
    """The peer hangs up, and a newer stream closes this one."""
    assert run(None) == ["memory"]


def test_an_abandoned_action_that_fails_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A peer could write tracebacks: asyncio logs an exception that is never asked for."""
    assert run(ValueError("planted")) == []
    assert not caplog.records
