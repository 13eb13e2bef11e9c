"""Policy allreduce: after a loss the other workers go on from the newest version."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.workers import until

ROOT = Path(__file__).parents[2]
GO_ON_SECONDS = 10.0
BATCHES = 40

SCRIPT = """
import hashlib, json, sys, time
import torch
from torch import nn
import psworker

rank, batches = int(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
with psworker.connect(sys.argv[1], rank=rank) as job:
    model = nn.Linear(5, 3)
    optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=1e-2), model)
    x = torch.arange(batches * 2 * 5.0).reshape(-1, 5) / 1000
    for (part,) in job.batches((x,), 2, seed=1):
        model(part).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print(json.dumps([optimizer.result.status, job.version, time.time()]), flush=True)
        time.sleep(0.1)  # the step of a larger model: faults happen during the training
    job.barrier()
    job.pull()
    flat = torch.cat([each.detach().flatten() for each in model.parameters()])
    print(json.dumps(["end", job.version, hashlib.sha256(flat.numpy().tobytes()).hexdigest()]))
"""


class Script:
    """The process of a worker, and what it has printed."""

    def __init__(self, address: str, rank: int, folder: Path, batches: int = BATCHES) -> None:
        self.output = folder / f"{rank}-{time.monotonic_ns()}.txt"
        path = os.pathsep.join([str(ROOT), str(ROOT / "common")])
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SCRIPT, address, str(rank), str(batches)],
                stdout=output,
                env=os.environ | {"PYTHONPATH": path},
            )

    def lines(self) -> list[list[object]]:
        return [json.loads(line) for line in self.output.read_text().splitlines()]

    def steps(self) -> list[tuple[int, float]]:
        """Return version and time of each step that counted."""
        return [(int(v), float(t)) for status, v, t in self.lines() if status == "applied"]  # type: ignore[call-overload]


@pytest.mark.full
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=lambda each: each.name)
@pytest.mark.parametrize("victim", [0, 1])
def test_others_go_on_after_a_loss(
    cluster: Callable[..., Cluster], tmp_path: Path, victim: int, sign: signal.Signals
) -> None:
    """The first worker has the store in which the others find each other."""
    servers = cluster(policy="allreduce", min_workers=3, lease=3.0)
    scripts = [Script(servers.address, rank, tmp_path) for rank in range(3)]
    try:
        until(
            lambda: all(len(script.steps()) >= 3 for script in scripts),
            "three steps of each worker",
            60,
        )
        before = max(version for script in scripts for version, _ in script.steps())
        lost_at = time.time()
        os.kill(scripts[victim].process.pid, sign)
        others = [script for script in scripts if script is not scripts[victim]]
        codes = [script.process.wait(60) for script in others]
    finally:
        for script in scripts:
            script.process.kill()
            script.process.wait()

    ends = [script.lines()[-1] for script in others]
    assert codes == [0, 0]
    assert ends[0] == ends[1]
    for script in others:
        later = [at for version, at in script.steps() if version > before + 1]
        assert later[0] - lost_at <= GO_ON_SECONDS
    ledger = servers.servers[0].service.executor.coordinator.ledger
    assert all(loop.ended for loop in ledger.loops.values())


KILLS = 20
STORM_BATCHES = 2400


@pytest.mark.full
@pytest.mark.timeout(400)
def test_data_is_exact_after_many_kills(cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    """Each batch counts once, and all workers end with the same weights.

    A worker is killed once all have made a step, so another one always has the newest weights.
    """
    servers = cluster(policy="allreduce", min_workers=3, lease=3.0)
    scripts = [Script(servers.address, rank, tmp_path, STORM_BATCHES) for rank in range(3)]
    try:
        for kill in range(KILLS):
            until(lambda: all(each.steps() for each in scripts), "a step of each worker", 60)
            rank = kill % 3
            scripts[rank].process.kill()
            scripts[rank].process.wait()
            scripts[rank] = Script(servers.address, rank, tmp_path, STORM_BATCHES)
        codes = [each.process.wait(120) for each in scripts]
    finally:
        for each in scripts:
            each.process.kill()
            each.process.wait()

    job = servers.servers[0].service.executor.coordinator.job
    ends = [each.lines()[-1] for each in scripts]
    assert codes == [0, 0, 0]
    assert ends == [ends[0]] * 3
    assert job.samples == 2 * STORM_BATCHES
    assert all(loop.ended for loop in job.ledger.loops.values())
