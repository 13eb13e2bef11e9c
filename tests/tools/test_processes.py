"""Processes of a job are killed, stopped and restarted; the job is found where it was."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.process_job import (
    Servers,
    state_of,
    status_of,
    stop,
    wait_for_version,
    worker,
)
from tests.support.programs import Programs, programs_in

SETTINGS = ("--policy", "async", "--lease", "20s")

# pushes ones without end; the weights show how many have counted
SCRIPT = """
import itertools
import psworker
from tests.support.workers import ONES, counter
with counter(None, lanes="grpc", connect_timeout=30.0) as client:
    for step in itertools.count(1):
        client.push(ONES)
        print("pushed", step)
"""


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with programs_in(tmp_path) as programs:
        programs.script(SCRIPT)
        yield programs


def test_only_workers_connect_through_proxies(programs: Programs) -> None:
    with Servers(programs, 2, *SETTINGS, proxied=True) as servers:
        pushing = worker(programs, servers, 0, "train.py")
        pushing.wait_for("pushed")
        for proxy in servers.proxies:
            proxy.cut()
            proxy.refuse()
        assert status_of(servers.address, connect_timeout=0.5) == {}
        for proxy in servers.proxies:
            proxy.heal()

        message = pushing.out.count("pushed")
        pushing.wait_for("pushed", times=message + 3)
        assert all(proxy.passed("up") for proxy in servers.proxies)


def test_all_processes_are_ended_afterwards(programs: Programs) -> None:
    """This includes stopped processes. A missing version is reported on time."""
    with Servers(programs, 1, *SETTINGS) as servers:
        with pytest.raises(AssertionError, match="version 1"):
            wait_for_version(servers.address, 1, seconds=0.3)
        pids = [program.pid for program in servers.programs]
        stop(servers.programs[0])

    assert [state_of(pid) for pid in pids] == [""]
