"""A TCP proxy between a worker and a server that simulates network faults.

It runs an asyncio loop in its own thread, on 127.0.0.1 only. Each fault starts and ends with a call
and applies to open and new connections. Delays and pieces are drawn from a seed.
"""

import asyncio
import os
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from tests.support.ports import free_port
from tests.support.proxy_line import CHUNK, Conditions, Direction, Line

BOTH: tuple[Direction, ...] = ("up", "down")
CALL_SECONDS = 20.0
NO_LINGER = struct.pack("ii", 1, 0)
"""SO_LINGER that makes close() send RST."""


def advertised(proxy: "Proxy", stream_bind: str, stream_proxy: "Proxy") -> list[str]:
    """Return the flags of a server that workers reach through proxies."""
    return [
        *("--advertise", proxy.address, "--stream-bind", stream_bind),
        *("--advertise-stream", stream_proxy.address),
    ]


class Proxy:
    """Forwards `address` to `target` ("HOST:PORT") in this context.

    "up" is from the client to the target, "down" the other direction. Calls are thread-safe and
    take effect before they return. `heal` ends all faults.
    """

    def __init__(self, target: str, *, seed: int = 0, port: int = 0) -> None:
        """port: port of `address`; 0 chooses a free one."""
        host, _, target_port = target.rpartition(":")
        self.target = host, int(target_port)
        self.port = port or free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.accepted = 0
        self._conditions = {name: Conditions(f"{seed} {name}") for name in BOTH}
        self._pairs: set[Pair] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=f"proxy-{self.port}", daemon=True
        )
        self._socket: socket.socket | None = None
        self._listens = False
        self._tasks: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Self:
        self._socket = self._bound()
        self._thread.start()
        self._call(self._listen())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_SECONDS)
        self._loop.close()

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._pairs)

    def passed(self, direction: Direction) -> int:
        """Return the number of bytes forwarded so far."""
        return self._conditions[direction].passed

    # ---- faults ----------------------------------------------------------------------------------

    def latency(
        self, seconds: float, jitter: float = 0.0, direction: Direction | None = None
    ) -> None:
        """Delay every byte by `seconds` and up to `jitter` more, in order."""
        self._change(direction, lambda way: way.delay(seconds, jitter))

    def rate(self, bytes_per_second: float, direction: Direction | None = None) -> None:
        """Limit each connection and direction; 0 removes the limit."""
        self._change(direction, lambda way: way.limit(bytes_per_second))

    def slice(self, max_bytes: int, direction: Direction | None = None) -> None:
        """Split data into pieces of 1 to `max_bytes` bytes; 0 stops splitting."""
        self._change(direction, lambda way: way.slice(max_bytes))

    def half_open(self, direction: Direction | None = None) -> None:
        """Accept bytes and hold them back, also the end of a connection, without notice.

        The bytes arrive after `heal` if the connection still exists.
        """
        self._change(direction, lambda way: way.block())

    def cut(self) -> None:
        """Close all connections by FIN. New ones are possible: see `refuse`."""
        self._call(self._drop(reset=False))

    def reset(self) -> None:
        """Close all connections by RST."""
        self._call(self._drop(reset=True))

    def refuse(self) -> None:
        """Refuse new connections (ECONNREFUSED). Open ones stay: see `cut`."""
        self._call(self._refuse())

    def heal(self) -> None:
        """End all faults. Closed connections stay closed."""
        self._call(self._heal())

    # ---- in the loop -----------------------------------------------------------------------------

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_SECONDS)

    def _change(self, direction: Direction | None, change: Callable[[Conditions], None]) -> None:
        async def both() -> None:
            for name in [direction] if direction else BOTH:
                change(self._conditions[name])

        self._call(both())

    async def _listen(self) -> None:
        assert self._socket is not None
        if not self._listens:
            self._listens = True
            self._socket.listen()
            self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        """Accept all waiting connections.

        asyncio's server would forget connections that arrive while it closes.
        """
        assert self._socket is not None
        with suppress(BlockingIOError):
            while self._listens:
                connection, _ = self._socket.accept()
                connection.setblocking(False)
                self.accepted += 1
                pair = Pair()
                self._pairs.add(pair)
                task = self._loop.create_task(self._carry(pair, connection))
                self._tasks.add(task)  # a reference keeps the task alive
                task.add_done_callback(self._tasks.discard)

    async def _carry(self, pair: "Pair", connection: socket.socket) -> None:
        await pair.run(connection, self.target, self._conditions)
        self._pairs.discard(pair)

    async def _refuse(self) -> None:
        if self._listens:
            self._close_listener()
            self._socket = self._bound()  # reserves the port without listening

    def _close_listener(self) -> None:
        assert self._socket is not None
        if self._listens:
            self._accept()  # accept earlier connections
            self._loop.remove_reader(self._socket)
            self._listens = False
        self._socket.close()

    async def _heal(self) -> None:
        for conditions in self._conditions.values():
            conditions.heal()
        await self._listen()

    async def _end(self) -> None:
        self._close_listener()
        await self._drop(reset=False)

    async def _drop(self, reset: bool) -> None:
        self._accept()
        while self._tasks:
            for pair in list(self._pairs):
                pair.drop(reset)
            await asyncio.wait(list(self._tasks))

    def _bound(self) -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setblocking(False)
        made.bind(("127.0.0.1", self.port))
        return made


class Pair:
    """One proxied connection: two sockets and the data between them."""

    def __init__(self) -> None:
        self._writers: list[asyncio.StreamWriter] = []
        self._work: asyncio.Task[None] | None = None
        self._dropped: bool | None = None  # the argument of an earlier drop()

    async def run(
        self, connection: socket.socket, target: tuple[str, int], ways: dict[Direction, Conditions]
    ) -> None:
        """Forward until both directions end, one fails, or the pair is dropped."""
        from_client, to_client = await asyncio.open_connection(sock=connection)
        self._writers.append(to_client)
        self._work = asyncio.create_task(self._carry(from_client, target, ways))
        if self._dropped is not None:
            self.drop(self._dropped)
        await asyncio.wait([self._work])
        if not self._work.cancelled() and self._work.exception() is not None:
            self.drop(reset=True)  # one side was reset, or the target refuses
        for writer in self._writers:
            writer.close()

    async def _carry(
        self,
        from_client: asyncio.StreamReader,
        target: tuple[str, int],
        ways: dict[Direction, Conditions],
    ) -> None:
        await ways["up"].wait_until_open()  # no connection to an unreachable target
        from_target, to_target = await asyncio.open_connection(*target)
        self._writers.append(to_target)
        lines = (
            Line(ways["up"], from_client, to_target),
            Line(ways["down"], from_target, self._writers[0]),
        )
        async with asyncio.TaskGroup() as parts:
            for line in lines:
                parts.create_task(line.take())
                parts.create_task(line.give())

    def drop(self, reset: bool) -> None:
        """End both connections at once and discard data under way."""
        self._dropped = reset
        for writer in self._writers:
            with suppress(OSError):  # the connection has already ended
                sock = writer.get_extra_info("socket")
                if reset:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
                while not reset and os.read(sock.fileno(), CHUNK):
                    pass  # unread data would cause a reset
            writer.transport.abort()
        if self._work is not None:
            self._work.cancel()
