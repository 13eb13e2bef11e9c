"""Work of streams that is done in threads."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest

from psserver.stream.stream_service import StreamService


def test_the_result_of_work_whose_stream_was_closed_is_given_back() -> None:
    began, goes_on = threading.Event(), threading.Event()
    found: list[str] = []

    def read() -> str:
        began.set()
        assert goes_on.wait(10.0)
        return "a read"

    async def run(service: StreamService) -> None:
        task = asyncio.create_task(service.do(read, abandoned=found.append))
        await asyncio.to_thread(began.wait, 10.0)
        task.cancel()
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    with ThreadPoolExecutor() as pool:
        engine = cast(Any, SimpleNamespace(is_quick=False))
        nothing = cast(Any, None)
        asyncio.run(run(StreamService(engine, nothing, pool, nothing)))

    assert found == ["a read"]
