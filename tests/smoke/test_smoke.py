"""Each command, policy, crash recovery, failover and reshard once, with real processes."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.environments import config
from tests.support.exactly_once import POLICIES, check, run
from tests.support.forked_job import ForkedJob
from tests.support.ports import free_port
from tests.support.programs import Programs, programs_in
from tests.support.pushes_over_failover import FLAGS, start_in_sync, stop_and_check, wait_for_pushes
from tests.support.standby_job import StandbyJob
from tests.support.worker_scripts import count
from tests.support.workers import counted, status, until, weights_of

PUSHES = 200
SCRIPT = """
import os, signal, torch, psworker

model = torch.nn.Linear(3, 1)
with psworker.connect() as job:
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for (x,) in job.batches(torch.utils.data.TensorDataset(torch.ones(40, 3)), batch_size=2):
        if job.rank == 1 and job.stats.steps == 2 and not os.path.exists("killed"):
            open("killed", "x").close()
            os.kill(os.getpid(), signal.SIGKILL)
        model(x).sum().backward()
        optimizer.step()
"""


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with programs_in(tmp_path) as programs:
        yield programs


@pytest.mark.every(3)
@pytest.mark.parametrize("policy", POLICIES)
def test_pushes_count_once_although_both_servers_are_killed(policy: str, tmp_path: Path) -> None:
    """The servers recover from their logs; requests and replies are lost and repeated."""
    check(run(tmp_path, policy, PUSHES), policy, PUSHES)


@pytest.mark.timing
def test_a_standby_takes_over_from_a_killed_primary(tmp_path: Path) -> None:
    with StandbyJob(tmp_path, 2, (*POLICIES["sync"], *FLAGS), count, pushes=10**6) as job:
        start_in_sync(job, 0)
        job.processes["s0"].kill()
        wait_for_pushes(job, time.monotonic())
        stop_and_check(job, "sync")


@pytest.mark.full
def test_a_running_job_reshards_to_more_and_to_fewer_servers(programs: Programs) -> None:
    """ps-ctl starts each reshard; no push is lost or counted twice."""
    flags = (*POLICIES["async"], "--min-workers", 2, "--durability", "log")
    with ForkedJob(
        programs.folder, 2, flags, count, pushes=400, lanes=("grpc", "shm"), pause=0.01
    ) as job:
        job.start_all(2)
        first = job.address.partition(",")[0]
        until(lambda: status(first)["version"] > 0, "pushes")
        job.add_servers(3)
        for shards in (3, 1):
            moved = programs.run("ps-ctl", "--ps", first, "reshard", "--servers", shards)
            assert moved.wait() == 0, moved.output
            assert len(status(first)["servers"]) == shards
        job.supervise(job.workers_done, 60)

        assert counted(weights_of(first)) == status(first)["version"] == 800
        assert "fenced 0" in job.all_logs()


def test_ps_server_ps_worker_and_ps_ctl_train_together(programs: Programs) -> None:
    programs.script(SCRIPT)
    server = programs.start(
        "ps-server", "--bind", "127.0.0.1:0", "--port-file", "port", "--exit-when-done"
    )
    until((programs.folder / "port").exists, "a port")
    address = "127.0.0.1:" + (programs.folder / "port").read_text().strip()
    found = programs.run("ps-ctl", "--ps", address, "status", "--output", "json")
    worker = programs.run("ps-worker", "--ps", address, "--", "train.py")

    assert json.loads(found.out)["state"] == "waiting for a model"
    assert (worker.wait(), server.wait()) == (0, 0), worker.output + server.output


def test_a_server_and_a_worker_find_each_other_by_tf_config(programs: Programs) -> None:
    programs.script(SCRIPT)
    cluster = {"ps": [f"127.0.0.1:{free_port()}"], "worker": ["127.0.0.1:1"]}
    server = programs.start("ps-server", "--exit-when-done", TF_CONFIG=config("ps", 0, **cluster))
    worker = programs.run("ps-worker", "train.py", TF_CONFIG=config("worker", 0, **cluster))

    assert (worker.wait(), server.wait()) == (0, 0), worker.output + server.output


@pytest.mark.full
def test_ps_run_restarts_a_killed_worker(programs: Programs) -> None:
    programs.script(SCRIPT)
    run = programs.run(
        "ps-run", "--servers", 2, "--workers", 2, "--summary", "summary.json", "train.py"
    )

    assert run.wait() == 0, run.output
    summary = json.loads((programs.folder / "summary.json").read_text())
    assert (summary["status"], summary["restarts"], summary["samples"]) == ("done", 1, 40)
