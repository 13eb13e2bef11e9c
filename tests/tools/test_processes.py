"""Processes of a job are killed, stopped and started again, and the job is found where it was
left.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.process_job import (
    Servers,
    go_on,
    kill,
    reached,
    state_of,
    status_of,
    stop,
    worker,
)
from tests.support.programs import Programs, programs_in
from tests.support.workers import until

SETTINGS = ("--policy", "async", "--lease", "20s")

# pushes ones for ever; what has counted is in the weights
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


def test_a_server_comes_back_on_its_port_with_its_data(programs: Programs, tmp_path: Path) -> None:
    with Servers(
        programs, 2, *SETTINGS, "--snapshot-every", "5steps", data_dir=tmp_path / "data"
    ) as servers:
        pushing = worker(programs, servers, 0, "train.py")
        reached(servers.address, 10)
        until(lambda: status_of(servers.address).get("snapshots"), "a snapshot")
        before = servers.programs[1].pid
        kill(pushing)

        seconds = servers.restart(1)

        assert 0 < seconds < 30
        assert servers.programs[1].pid != before
        assert state_of(before) == ""
        assert status_of(servers.address)["version"] >= 5


def test_a_stopped_server_holds_workers_up_until_it_goes_on(programs: Programs) -> None:
    with Servers(programs, 1, *SETTINGS) as servers:
        pushing = worker(programs, servers, 0, "train.py")
        pushing.wait_for("pushed", times=3)
        stop(servers.programs[0])
        silent = pushing.out.count("pushed")
        with pytest.raises(AssertionError, match="did not say"):
            pushing.wait_for("pushed", times=silent + 3, seconds=0.5)

        go_on(servers.programs[0])

        pushing.wait_for("pushed", times=silent + 3)


def test_workers_go_through_proxies_and_servers_do_not(programs: Programs) -> None:
    with Servers(programs, 2, *SETTINGS, proxied=True) as servers:
        pushing = worker(programs, servers, 0, "train.py")
        pushing.wait_for("pushed")
        for proxy in servers.proxies:
            proxy.cut()
            proxy.refuse()
        assert status_of(servers.address, patience=0.5) == {}
        for proxy in servers.proxies:
            proxy.heal()

        said = pushing.out.count("pushed")
        pushing.wait_for("pushed", times=said + 3)
        assert all(proxy.passed("up") for proxy in servers.proxies)


def test_nothing_runs_when_it_ends(programs: Programs) -> None:
    """Not even what stands still. What did not happen before is said in time."""
    with Servers(programs, 1, *SETTINGS) as servers:
        with pytest.raises(AssertionError, match="version 1"):
            reached(servers.address, 1, seconds=0.3)
        pids = [program.pid for program in servers.programs]
        stop(servers.programs[0])

    assert [state_of(pid) for pid in pids] == [""]
