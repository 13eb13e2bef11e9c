"""Which threads do the work of streams."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace
from typing import Any, cast

import pytest

from psserver.sockets import socket_port
from psserver.sockets.event_loop import SocketService, SocketWaiter
from psserver.sockets.socket_port import SocketPort


def test_the_result_of_work_whose_stream_was_closed_is_given_back() -> None:
    began, goes_on = threading.Event(), threading.Event()
    found: list[str] = []

    def read() -> str:
        began.set()
        assert goes_on.wait(10.0)
        return "a read"

    async def run(service: SocketService) -> None:
        task = asyncio.create_task(SocketWaiter(service).do(read, abandoned=found.append))
        await asyncio.to_thread(began.wait, 10.0)
        task.cancel()
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    with ThreadPoolExecutor() as pool:
        engine = cast(Any, SimpleNamespace(is_quick=False))
        nothing = cast(Any, None)
        asyncio.run(run(SocketService(engine, nothing, pool, nothing)))

    assert found == ["a read"]


@pytest.mark.parametrize("is_quick", [True, False])
def test_only_quick_work_is_done_in_the_thread_of_the_event_loop(is_quick: bool) -> None:
    async def run(service: SocketService) -> tuple[str, str]:
        return threading.current_thread().name, await SocketWaiter(service).do(
            lambda: threading.current_thread().name
        )

    with ThreadPoolExecutor(thread_name_prefix="pool") as pool:
        engine = cast(Any, SimpleNamespace(is_quick=is_quick))
        nothing = cast(Any, None)
        loop, found = asyncio.run(run(SocketService(engine, nothing, pool, nothing)))

    assert (found == loop, found.startswith("pool")) == (is_quick, not is_quick)


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (3, 3), (4, 4), (64, 4)])
def test_a_server_has_an_event_loop_for_each_core_and_at_most_four(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: int
) -> None:
    monkeypatch.setattr(socket_port, "cores", lambda: cores)
    with closing(SocketPort()) as port:
        port.open_port("127.0.0.1:0", is_requested=True)
        port.start(cast(Any, None))

        running = [thread for thread in threading.enumerate() if thread in port._threads]
        assert len(running) == threads
    assert not any(thread.is_alive() for thread in running)
