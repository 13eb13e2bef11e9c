"""Ports that nobody has, for tests that must name one before they use it."""

import random
import socket
from contextlib import suppress

BELOW_EPHEMERAL = range(20_000, 32_000)
"""Not where the system takes the ports of outgoing connections from: one of those could come in between."""

_random = random.SystemRandom()


def free_ports(count: int) -> list[int]:
    """That follow one another."""
    while True:
        first = _random.choice(BELOW_EPHEMERAL)
        ports = list(range(first, first + count))
        with suppress(OSError):
            for port in ports:
                socket.create_server(("127.0.0.1", port)).close()
            return ports


def free_port() -> int:
    return free_ports(1)[0]
