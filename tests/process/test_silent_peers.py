"""Thousands of sockets that say nothing delay no worker, and servers close them."""

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import pytest

from pscommon.system.process_limits import raise_file_limit
from tests.support.hostile_job import HostileJob

SOCKETS_PER_PORT = 1000
STEPS = 2000
RUNS = 3
TURNS = 4
MAX_RATIO = 2.0
CLOSED_SECONDS = 10.0
"""Seconds after which a server must have closed a silent socket."""
LATE_SECONDS = 5.0
"""What a loaded machine may add to that."""

pytestmark = [pytest.mark.timing, pytest.mark.timeout(600)]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[HostileJob]:
    with HostileJob(tmp_path) as running:
        yield running


def steps(job: HostileJob) -> list[float]:
    """Return the seconds of each step."""
    seconds = []
    for _ in range(STEPS // TURNS):
        began = time.perf_counter()
        job.push()
        seconds.append(time.perf_counter() - began)
    return seconds


def p99(seconds: Sequence[float]) -> float:
    return sorted(seconds)[len(seconds) * 99 // 100]


def open_silent(stack: ExitStack, addresses: Sequence[str]) -> list[socket.socket]:
    assert raise_file_limit() > 2 * SOCKETS_PER_PORT * len(addresses)
    found = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        for _ in range(SOCKETS_PER_PORT):
            found.append(stack.enter_context(socket.create_connection((host, int(port)), 10.0)))
    return found


def wait_until_closed(sockets: Sequence[socket.socket], deadline: float) -> None:
    """Wait until the peer has closed all sockets; what it sends before is ignored."""
    for sock in sockets:
        sock.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            while sock.recv(1 << 10):
                pass
        except ConnectionResetError:
            pass


def test_silent_sockets_are_closed(job: HostileJob) -> None:
    """On each TCP port of both shards."""
    with ExitStack() as stack:
        sockets = open_silent(stack, job.tcp_ports)
        opened = time.monotonic()
        wait_until_closed(sockets, opened + CLOSED_SECONDS + LATE_SECONDS)
    job.step()


def test_silent_sockets_delay_no_worker(job: HostileJob) -> None:
    """Turns with and without them alternate; each turn has new sockets, as servers close them."""
    ratios = []
    for _ in range(RUNS):
        alone, beside = list[float](), list[float]()
        for _ in range(TURNS):
            alone += steps(job)
            with ExitStack() as stack:
                open_silent(stack, job.tcp_ports)
                beside += steps(job)
        ratios.append(p99(beside) / p99(alone))
        print(f"p99 of a step: {p99(alone) * 1e3:.2f} ms alone, {p99(beside) * 1e3:.2f} ms beside")
    job.check_weights()
    assert median(ratios) < MAX_RATIO, (ratios, os.getloadavg())
