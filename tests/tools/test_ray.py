"""ps-run --on ray on a real Ray cluster of two nodes; `make test-ray` runs it."""

import json
import re
import signal
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support import ray_nodes
from tests.support.ports import free_port
from tests.support.programs import Program, Programs, programs_in
from tests.support.settings_coverage import run_setting

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="not installed: ray"),
    pytest.mark.timeout(400),
]

CPUS = 4
SECONDS = 180.0
DIGITS = ("-m", "psworker.examples.digits", "--epochs")


class Nodes:
    """A running cluster."""

    def __init__(self, programs: Programs, cluster: Program) -> None:
        self._programs, self.cluster = programs, cluster
        self._address = cluster.wait_for("cluster at ", seconds=SECONDS).split()[-1]

    def run(self, *args: object, **variables: object) -> Program:
        variables = {"RAY_ADDRESS": self._address, **ray_nodes.VARIABLES, **variables}
        return self._programs.start("ps-run", "--on", "ray", *args, **variables)


@pytest.fixture
def cpus() -> int:
    """Return the CPUs of each node."""
    return CPUS


@pytest.fixture
def nodes(tmp_path: Path, cpus: int) -> Iterator[Nodes]:
    with programs_in(tmp_path) as programs:
        cluster = programs.start("python", ray_nodes.__file__, cpus)
        yield Nodes(programs, cluster)
        cluster.send(signal.SIGTERM)
        cluster.wait(SECONDS)


@run_setting("on", "worker_resources")
def test_output_and_summary_are_those_of_one_machine(nodes: Nodes, tmp_path: Path) -> None:
    """Too many resources for the cluster, in the second run, end it with exit code 21."""
    run = nodes.run("--servers", 2, "--workers", 2, "--summary", "summary.json", *DIGITS, 2)
    began = time.monotonic()
    run.wait_for("epoch 0:", seconds=SECONDS)
    print(f"from the start to the end of the first epoch: {time.monotonic() - began:.1f} s")

    assert run.wait(SECONDS) == 0, run.output
    assert "[run] 2 servers, 2 workers on Ray; threads" in run.err
    assert all(f"[{name}] " in run.output for name in ("s0", "s1", "w0", "w1"))
    assert "raylet" not in run.output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["workers"], summary["restarts"]) == ("done", 2, 0)
    assert "weights sha256" in run.out

    large = ("--worker-resources", "CPU=3", "--connect-timeout", "2s")
    run = nodes.run("--workers", 3, *large, *DIGITS, 2)

    assert run.wait(SECONDS) == 21
    assert "CPU 9 are needed, CPU 8 are free. Try: add nodes, or fewer `--workers`" in run.err


def test_the_exit_code_and_the_traceback_of_a_failed_script_are_shown(
    nodes: Nodes, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("raise ArithmeticError('seven')\n")
    run = nodes.run("--workers", 1, "train.py")

    assert run.wait(SECONDS) == 1
    assert "first failure: w0" in run.err
    assert "ArithmeticError: seven" in run.err


def test_a_further_worker_runs_where_resources_are_free(nodes: Nodes, tmp_path: Path) -> None:
    """The servers want three workers, and ps-run has reserved places for two."""
    settings = ("--workers", 2, "--scale-workers", "3..3", "--summary", "summary.json")
    run = nodes.run(*settings, *DIGITS, 60)
    run.wait_for("[w2] ", seconds=SECONDS)

    assert run.wait(SECONDS) == 0, run.output
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "done"


def test_an_interrupted_run_ends_all_processes(nodes: Nodes) -> None:
    run = nodes.run("--workers", 2, *DIGITS, 1000)
    run.wait_for("epoch 1:", seconds=SECONDS)
    run.send(signal.SIGINT)

    assert run.wait(SECONDS) == 130


def test_training_continues_when_a_node_is_lost(nodes: Nodes, tmp_path: Path) -> None:
    """Its processes start again on the other node; a log loses no update."""
    data = ("--data-dir", "data", "--durability", "log", "--summary", "summary.json")
    run = nodes.run("--servers", 2, "--workers", 2, *data, *DIGITS, 60)
    began = time.monotonic()
    run.wait_for("epoch 0:", seconds=SECONDS)
    started = time.monotonic() - began
    run.wait_for("epoch 3:", seconds=SECONDS)
    nodes.cluster.send(signal.SIGUSR1)
    run.wait_for("was killed by SIGKILL; restart 1", seconds=SECONDS)
    noticed = time.monotonic()
    before = max(int(number) for number in re.findall(r"epoch (\d+):", run.output))
    run.wait_for(f"epoch {before + 1}:", seconds=SECONDS)
    seconds = time.monotonic() - noticed
    print(f"from the noticed loss to the next epoch: {seconds:.1f} s; start {started:.1f} s")

    assert run.wait(SECONDS) == 0, run.output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "done"
    assert summary["restarts"] >= 1


@pytest.mark.parametrize("cpus", [2])
def test_workers_that_find_no_node_are_not_waited_for(nodes: Nodes, tmp_path: Path) -> None:
    """The other workers, on the first node, train to the end."""
    run = nodes.run("--workers", 4, "--summary", "summary.json", *DIGITS, 60)
    run.wait_for("epoch 3:", seconds=SECONDS)
    nodes.cluster.send(signal.SIGUSR1)
    run.wait_for("waiting for a node of Ray with free resources", times=2, seconds=SECONDS)

    assert run.wait(SECONDS) == 0, run.output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["restarts"]) == ("done", 2)


def test_no_cluster_is_found(tmp_path: Path) -> None:
    with programs_in(tmp_path) as programs:
        for address in (f"127.0.0.1:{free_port()}", "nowhere"):
            run = programs.start("ps-run", "--on", "ray", *DIGITS, 1, RAY_ADDRESS=address)

            assert run.wait(SECONDS) == 2
            assert "found no Ray cluster" in run.err
            assert "Try: `ray start --head`" in run.err
