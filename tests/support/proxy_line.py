"""One direction of a proxied connection and its simulated conditions."""

import asyncio
import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Literal

Direction = Literal["up", "down"]

CHUNK = 64 << 10
WAITING = 1024
"""Chunks that a line buffers before it stops reading: 64 MiB."""


class Conditions:
    """Conditions of one direction for all connections. Used in the proxy's loop only."""

    def __init__(self, seed: str) -> None:
        self.passed = 0
        self._random = random.Random(seed)
        self._open = asyncio.Event()
        self._open.set()
        self._changed = asyncio.Event()
        self._clear()

    def _clear(self) -> None:
        self._latency = self._jitter = self._rate = 0.0
        self._slice = 0

    def delay(self, seconds: float, jitter: float) -> None:
        self._latency, self._jitter = seconds, jitter

    def limit(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._wake()

    def slice(self, max_bytes: int) -> None:
        self._slice = max_bytes

    def block(self) -> None:
        self._open.clear()

    def heal(self) -> None:
        self._clear()
        self._open.set()
        self._wake()

    def due(self, now: float) -> float:
        """Return when bytes that arrive now may be forwarded."""
        return now + self._latency + self._random.uniform(0.0, self._jitter)

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """Yield pieces small enough for an even rate, or slices if configured."""
        while data:
            size = self._random.randint(1, self._slice) if self._slice else len(data)
            if self._rate:
                size = min(size, max(1, int(self._rate / 20)))
            yield data[:size]
            data = data[size:]

    async def wait_until_open(self) -> None:
        """Wait while this direction is half open."""
        await self._open.wait()

    async def until(self, due: float) -> None:
        """Wait until that time or until the proxy is healed."""
        seconds = due - asyncio.get_running_loop().time()
        if seconds > 0 and self._latency + self._jitter:
            await self._pause(seconds)

    async def wait_for_rate(self, nbytes: int) -> None:
        """Wait for the time that these bytes take at the configured rate."""
        if self._rate:
            await self._pause(nbytes / self._rate)

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Line:
    """Reads data and forwards it when due. Both coroutines run concurrently and end with
    OSError.
    """

    def __init__(
        self, conditions: Conditions, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._conditions = conditions
        self._reader, self._writer = reader, writer
        self._waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(WAITING)

    async def take(self) -> None:
        """Read until the end of the stream, which is empty bytes."""
        loop, due, data = asyncio.get_running_loop(), 0.0, b"-"
        while data:
            data = await self._read()
            due = max(due, self._conditions.due(loop.time()))
            await self._waiting.put((due, data))

    async def _read(self) -> bytes:
        try:
            return await self._reader.read(CHUNK)
        except OSError:  # a reset is forwarded like data
            await self._conditions.wait_until_open()
            raise

    async def give(self) -> None:
        while True:
            due, data = await self._waiting.get()
            await self._conditions.until(due)
            await self._conditions.wait_until_open()
            if not data:
                self._writer.write_eof()
                return
            for piece in self._conditions.pieces(data):
                await self._conditions.wait_until_open()
                self._conditions.passed += len(piece)
                self._writer.write(piece)
                await self._writer.drain()
                await self._conditions.wait_for_rate(len(piece))
