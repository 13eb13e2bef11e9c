"""Servers and workers find each other by the variables of an engine alone, without flags."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.environments import config
from tests.support.ports import free_ports
from tests.support.programs import BIN, Program, Programs, programs_in

SCRIPT = """
import os, torch, psworker

torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
with psworker.connect(wait_timeout=60) as job:
    rank = os.environ.get("RANK", 0) if "PS_GROUP" in os.environ else 0
    print(f"worker {job.rank} of {job.workers}, rank {rank} inside", flush=True)
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for (x,) in job.batches(torch.utils.data.TensorDataset(torch.ones(64, 3)), batch_size=2):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    print("done", job.stats.steps, flush=True)
"""
SERVER = ("ps-server", "--exit-when-done")
WORKER = ("ps-worker", "--device", "cpu", "train.py")
NO_PYTHON = ("--nproc-per-node", 2, "--no-python")


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with programs_in(tmp_path) as programs:
        programs.script(SCRIPT)
        yield programs


class Pods:
    """Pods on this machine: they share a network with a loopback device only, and host names.

    Each pod has a host name of its own. The network is that of a process that waits.
    """

    def __init__(self, programs: Programs, hosts: dict[str, str]) -> None:
        if os.geteuid() or not shutil.which("nsenter"):
            pytest.skip("namespaces need root and util-linux")
        self._programs = programs
        names = programs.folder / "hosts"
        names.write_text("".join(f"{address} {name}\n" for name, address in hosts.items()))
        line = f"ip link set lo up; mount --bind {names} /etc/hosts; echo ready; exec sleep 600"
        shell = ("unshare", "--net", "--mount", "sh", "-ec", line)
        self._network = programs.start("/usr/bin/env", *shell)
        self._network.wait_for("ready")

    def start(self, name: str, *line: object, **environment: object) -> Program:
        """Start a command in a new pod with this host name."""
        folder = self._programs.folder
        inside = ("nsenter", "-t", self._network.pid, "--net", "--mount", "unshare", "--uts")
        command = (BIN / str(line[0]), *line[1:])
        name_and_run = ("sh", "-ec", f'hostname {name}; cd {folder}; exec "$@"', "sh")
        return self._programs.start("/usr/bin/env", *inside, *name_and_run, *command, **environment)


def ended(servers: list[Program], workers: list[Program], count: int) -> None:
    """Check that all processes end, and that the workers have the ranks 0 to count."""
    for program in (*workers, *servers):
        assert program.wait() == 0, program.output
    text = "".join(worker.out for worker in workers)
    found = re.findall(r"worker (\d+) of (\d+)", text)
    assert sorted(found) == [(str(rank), str(count)) for rank in range(count)]
    assert sum(map(int, re.findall(r"done (\d+)", text))) == 32  # of 64 rows


def detected(program: Program) -> dict[str, object]:
    lines = [json.loads(line) for line in program.err.splitlines() if line.startswith("{")]
    found: dict[str, object] = next(
        line for line in lines if line["event"] == "environment_detected"
    )
    return found


def test_the_tasks_of_tf_config(programs: Programs) -> None:
    """A TFJob with two servers, a chief, and a worker whose script is started directly."""
    servers = [f"127.0.0.1:{port}" for port in free_ports(2)]
    cluster = {"ps": servers, "chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]}

    def task(kind: str, index: int, *line: object) -> Program:
        return programs.start(*map(str, line), TF_CONFIG=config(kind, index, **cluster))

    serving = [task("ps", index, *SERVER) for index in range(2)]
    workers = [task("chief", 0, *WORKER), task("worker", 0, "python", "train.py")]

    ended(serving, workers, 2)
    found = detected(serving[1])
    assert (found["environment"], found["index"], found["servers"]) == ("TF_CONFIG", 1, 2)
    assert found["workers"] == 2
    assert detected(workers[0])["addresses"] == ",".join(servers)


def test_the_pods_of_a_stateful_set_and_of_an_indexed_job(programs: Programs) -> None:
    pods = Pods(programs, {"ps-0.ps": "127.0.0.2", "ps-1.ps": "127.0.0.3"})
    named = {"PS_ALL_SERVERS": "ps-0.ps:50051,ps-1.ps:50052"}
    flags = ("--insecure", "--min-workers", 2)

    servers = [pods.start(f"ps-{index}", *SERVER, *flags, **named) for index in range(2)]
    workers = [
        pods.start(f"train-{index}", *WORKER, **named, JOB_COMPLETION_INDEX=index)
        for index in range(2)
    ]

    ended(servers, workers, 2)
    assert "0.0.0.0:50052" in servers[1].err
    assert detected(servers[1])["variables"] == "PS_ALL_SERVERS, the host name"
    assert detected(workers[1])["environment"] == "PS_ALL_SERVERS, indexed Job"


def test_the_pods_of_kubeflow_trainer(programs: Programs) -> None:
    """The pods of a TrainJob with the replicated jobs "ps" and "node"."""
    hosts = {f"job-ps-0-{index}.job": f"127.0.0.{index + 2}" for index in range(2)}
    pods = Pods(programs, hosts)
    named = {"PS_ALL_SERVERS": "job-ps-0-0.job:50051,job-ps-0-1.job:50052"}
    flags = ("--insecure", "--min-workers", 2)

    servers = [
        pods.start(f"job-ps-0-{index}", *SERVER, *flags, **named, JOB_COMPLETION_INDEX=index)
        for index in range(2)
    ]
    trainer = {"PET_NNODES": 2, "PET_NPROC_PER_NODE": 1, "PET_MASTER_ADDR": "job-node-0-0.job"}
    workers = [
        pods.start(
            f"job-node-0-{index}",
            *WORKER,
            **named,
            **trainer,
            PET_NODE_RANK=index,
            JOB_COMPLETION_INDEX=index,
        )
        for index in range(2)
    ]

    ended(servers, workers, 2)
    assert detected(workers[1])["workers"] == 2


def test_the_tasks_of_two_steps_of_slurm(programs: Programs) -> None:
    """The batch script names the node of shard 0 for the workers."""
    pods = Pods(programs, {"node01": "127.0.0.2", "node02": "127.0.0.3"})

    def step(task: int, *line: object, **environment: object) -> Program:
        slurm = {
            "SLURM_PROCID": task,
            "SLURM_NTASKS": 2,
            "SLURM_STEP_NUM_TASKS": 2,
            "SLURM_STEP_NODELIST": "node[01-02]",
            "SLURMD_NODENAME": f"node{task + 1:02}",
        }
        return pods.start("compute", *line, **slurm, **environment)

    servers = [step(task, *SERVER, "--insecure", "--min-workers", 2) for task in range(2)]
    workers = [step(task, *WORKER, PS_SERVERS="node01:50051") for task in range(2)]

    ended(servers, workers, 2)
    assert "0.0.0.0:50052" in servers[1].err


def server_at(programs: Programs, *flags: object) -> tuple[Program, str]:
    port = free_ports(1)[0]
    return programs.start(*SERVER, "--bind", f"127.0.0.1:{port}", *flags), f"127.0.0.1:{port}"


def test_the_processes_of_torchrun(programs: Programs) -> None:
    server, address = server_at(programs, "--min-workers", 2)
    launcher = programs.start(
        "torchrun", "--standalone", *NO_PYTHON, BIN / WORKER[0], *WORKER[1:], PS_SERVERS=address
    )

    ended([server], [launcher], 2)


def test_a_group_of_torchrun_in_an_indexed_job(programs: Programs) -> None:
    """The job gives the rank of the worker, torchrun the ranks inside it."""
    server, address = server_at(programs, "--min-workers", 2)
    line = (*NO_PYTHON, BIN / WORKER[0], "--group", *WORKER[1:])
    jobs = [
        programs.start(
            "torchrun", "--standalone", *line, PS_SERVERS=address, JOB_COMPLETION_INDEX=index
        )
        for index in range(2)
    ]

    for program in (*jobs, server):
        assert program.wait() == 0, program.output
    for worker, job in enumerate(jobs):
        found = re.findall(r"worker (\d) of 2, rank (\d) inside", job.out)
        assert sorted(found) == [(str(worker), "0"), (str(worker), "1")]


def test_fewer_workers_than_the_cluster_has(programs: Programs) -> None:
    """The server waits for all workers of TF_CONFIG, and the worker learns how many are missing."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    cluster = {"ps": [address], "worker": [f"127.0.0.1:{port}" for port in (1, 2, 3)]}
    server = programs.start(*SERVER, "--join-timeout", 3, TF_CONFIG=config("ps", 0, **cluster))
    worker = programs.start(*WORKER, TF_CONFIG=config("worker", 0, **cluster))

    assert worker.wait() == 21, worker.output
    assert "1 of --min-workers 3 are here" in worker.err
    assert detected(server)["workers"] == 3


def test_more_workers_are_required_than_the_cluster_has(programs: Programs) -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    cluster = config("ps", 0, ps=[address], worker=["127.0.0.1:1"])
    server = programs.start(*SERVER, "--min-workers", 2, "--join-timeout", 3, TF_CONFIG=cluster)

    server.wait_for("min_workers_not_reached")


@pytest.mark.parametrize(
    ("line", "reason"),
    [(SERVER, "TF_CONFIG says that this process is a worker"), (WORKER, "needs `ps` entries")],
)
def test_a_cluster_without_servers(line: tuple[str, ...], reason: str, programs: Programs) -> None:
    text = config("worker", 0, worker=["127.0.0.1:1"])
    program = programs.run(*line, TF_CONFIG=text)

    assert program.wait() == 2
    assert reason in program.err


def test_environments_that_contradict_each_other(programs: Programs) -> None:
    text = config("worker", 1, ps=["127.0.0.1:1"], worker=["127.0.0.1:2", "127.0.0.1:3"])
    worker = programs.run(*WORKER, TF_CONFIG=text, JOB_COMPLETION_INDEX=2)
    line = ("-c", "import psworker; psworker.connect()")
    script = programs.run("python", *line, TF_CONFIG=text, JOB_COMPLETION_INDEX=2)

    assert (worker.wait(), script.wait()) == (2, 1)
    for program in (worker, script):
        for part in ("TF_CONFIG", "JOB_COMPLETION_INDEX", "`--worker-rank N` (PS_WORKER_RANK)"):
            assert part in program.err
