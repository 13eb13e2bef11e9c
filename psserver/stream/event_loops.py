"""Threads that each run an event loop with a part of the streams."""

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Protocol

from pscommon.wire.stream_format import ALIVE_INTERVAL_SECONDS

MAX_LOOPS_COUNT = 4


class ServedStream(Protocol):
    """A connection that is served in an event loop.

    Attributes:
        task: Serves it; closes it at its end.
    """

    task: "asyncio.Task[None]"

    def keep_alive(self) -> None:
        """Send a sign of life if the peer waits for an answer; called every second."""


class EventLoopThread(threading.Thread):
    """One event loop in a daemon thread.

    Attributes:
        loop: The event loop.
        streams: The streams of this loop; only its thread changes them.
    """

    def __init__(self, number: int) -> None:
        super().__init__(name=f"stream-{number}", daemon=True)
        self.loop = asyncio.new_event_loop()
        self.streams: set[ServedStream] = set()

    def run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.call_soon(self._keep_alive)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def add(self, sock: socket.socket, serve: Callable[[socket.socket], ServedStream]) -> None:
        """Serve a connection. From any thread."""
        self.loop.call_soon_threadsafe(self._add, sock, serve)

    def end(self) -> None:
        """Close all streams, then end the loop and its thread."""
        self.loop.call_soon_threadsafe(self.loop.create_task, self._end())
        self.join()

    def _add(self, sock: socket.socket, serve: Callable[[socket.socket], ServedStream]) -> None:
        stream = serve(sock)
        self.streams.add(stream)
        stream.task.add_done_callback(lambda task: self._remove(stream, task))

    def _remove(self, stream: ServedStream, task: "asyncio.Task[None]") -> None:
        self.streams.discard(stream)
        if not task.cancelled() and (bug := task.exception()) is not None:
            self.loop.call_exception_handler({"message": "a stream failed", "exception": bug})

    def _keep_alive(self) -> None:
        for stream in self.streams:
            stream.keep_alive()
        self.loop.call_later(ALIVE_INTERVAL_SECONDS, self._keep_alive)

    async def _end(self) -> None:
        tasks = [stream.task for stream in self.streams]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self.loop.stop()
