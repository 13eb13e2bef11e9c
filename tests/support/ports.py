"""Unused ports for tests that must name a port before they bind it."""

import atexit
import random
import socket
import threading
from contextlib import suppress

BELOW_EPHEMERAL = range(20_000, 32_000)
"""Outside the range of ports that the system gives to outgoing connections."""

BLOCK = 600
"""Number of ports in a block; each is returned once before the process claims another block."""


class Ports:
    """Blocks of ports; the process that listens on the first port owns the block.

    A returned port is not returned again, here or in a concurrent test, before it is used.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._claim: socket.socket | None = None
        self._left = range(0)

    def take(self, count: int) -> list[int]:
        """Return `count` consecutive ports."""
        with self._lock:
            while True:
                while len(self._left) < count:
                    self._left = self._another_block()
                ports, self._left = list(self._left[:count]), self._left[count:]
                with suppress(OSError):
                    for port in ports:
                        _listen(port).close()
                    return ports

    def close(self) -> None:
        if self._claim is not None:
            self._claim.close()

    def _another_block(self) -> range:
        first = random.SystemRandom().choice(BELOW_EPHEMERAL[::BLOCK])
        try:
            claim = _listen(first)
        except OSError:
            return range(0)
        self.close()
        self._claim = claim
        return range(first + 1, first + BLOCK)


def _listen(port: int) -> socket.socket:
    return socket.create_server(("127.0.0.1", port))


_ports = Ports()
atexit.register(_ports.close)


def free_ports(count: int) -> list[int]:
    """Return `count` consecutive ports."""
    return _ports.take(count)


def free_port() -> int:
    return free_ports(1)[0]


def free_port_below(distance: int) -> int:
    """Return a port for which the port `distance` above is unused, too."""
    while True:
        port = free_port()
        with suppress(OSError):
            _listen(port + distance).close()
            return port
