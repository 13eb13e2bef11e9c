"""A 3 Mbit/s link: large transfers are slow, and no peer is declared lost meanwhile."""

import shutil
from pathlib import Path

import pytest

from benchmarks.link import SERVER_ADDRESS, inside, missing
from tests.support.lanes import each_network_lane
from tests.support.namespaces import Cable
from tests.support.process_job import MODULES
from tests.support.programs import BIN, programs_in

pytestmark = pytest.mark.timing

MEGABITS, FLOATS = 3, 500_000
ADDRESS = f"{SERVER_ADDRESS}:4000"

SCRIPT = f"""
import sys

import numpy as np, psworker
ones = {{"w": np.ones({FLOATS}, np.float32)}}
with psworker.Client("{ADDRESS}", lanes=sys.argv[1], connect_timeout=5.0) as client:
    client.register({{"w": np.zeros({FLOATS}, np.float32)}}, psworker.OptimizerSpec("sgd", lr=1.0))
    print(client.push_pull(ones).status, client.weights["w"].mean())
"""


@each_network_lane
def test_a_large_push_completes_over_a_slow_link(tmp_path: Path, lanes: str) -> None:
    """Initial weights of 2 MB go up, the step goes up and down. Each takes over 5 s, the longest
    silence that a server may have.
    """
    if reason := missing():
        pytest.skip(reason)
    with Cable(MEGABITS) as cable, programs_in(tmp_path) as programs:

        def within(name: str) -> tuple[str, ...]:
            prefix, *rest = inside(name)
            return str(shutil.which(prefix)), *rest

        flags = ("--bind", ADDRESS, "--insecure", "--lanes", lanes)
        server = programs.start(
            *within(cable.server), BIN / "ps-server", *flags, PYTHONPATH=MODULES
        )
        server.wait_for("listening")
        worker = programs.start(
            *within(cable.worker), BIN / "python", "-c", SCRIPT, lanes, PYTHONPATH=MODULES
        )

        assert worker.wait(seconds=90) == 0, worker.output
        assert worker.out == "applied -1.0\n"
        assert "does not answer" not in worker.err
        assert "worker_lost" not in server.err
