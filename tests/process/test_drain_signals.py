"""Signals to worker processes; the servers run in the process of the test."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.fake_server import FakeCluster

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(shards=2, lease=0.1) as cluster:
        yield cluster


RUN = (
    "import sys; from psworker.supervision.script import Script, run; "
    "sys.exit(run(Script(sys.argv[1])))"
)

SCRIPT = """
import torch, psworker
with psworker.connect() as job:
    net = torch.nn.Linear(1, 1)
    optimizer = job.optimizer(torch.optim.SGD(net.parameters(), lr=0.5), net)
    for (x,) in job.batches((torch.ones(9, 1),), 1):
        net(x).sum().backward()
        print("step", flush=True)
        optimizer.step()
    job.report(done=1)
print("end", flush=True)
"""


WITH_LOGS = f"from pscommon.telemetry import logs; logs.set_up_worker('info', 'json'); {RUN}"


@pytest.fixture
def script(cluster: FakeCluster, tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Yield a worker process that trains against the cluster."""
    with started(cluster, tmp_path, RUN) as process:
        yield process


@contextmanager
def started(cluster: FakeCluster, folder: Path, run: str) -> Iterator["subprocess.Popen[str]"]:
    (folder / "train.py").write_text(SCRIPT)
    environment = {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'common'}",
        "PS_SERVERS": ",".join(cluster.addresses),
    }
    with subprocess.Popen(
        [sys.executable, "-P", "-c", run, str(folder / "train.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def finish(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_sigterm_lets_a_worker_finish_its_step(
    cluster: FakeCluster, script: "subprocess.Popen[str]"
) -> None:
    cluster.deal(*range(9))
    release, is_waiting = threading.Event(), threading.Event()
    # upload, pull, a push
    cluster.before[0].extend([lambda: None] * 2 + [lambda: (is_waiting.set(), release.wait(30))[0]])
    assert is_waiting.wait(60)

    script.send_signal(signal.SIGTERM)
    release.set()

    assert finish(script) == (0, "step\n", "")
    assert cluster.counted == [(1, 1)]
    assert cluster.left == {1: "", 2: ""}
    assert cluster.metrics == {}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_logs_at_once_what_ends_the_script(
    cluster: FakeCluster, tmp_path: Path, number: signal.Signals
) -> None:
    """While the worker is within a step."""
    cluster.deal(*range(9))
    release, is_waiting = threading.Event(), threading.Event()
    cluster.before[0].extend([lambda: None] * 2 + [lambda: (is_waiting.set(), release.wait(30))[0]])
    with started(cluster, tmp_path, WITH_LOGS) as process:
        try:
            assert is_waiting.wait(60)
            process.send_signal(number)
            assert process.stderr is not None
            events = (json.loads(line) for line in process.stderr)
            found = next(each for each in events if each["event"] == "leave_requested")
        finally:
            release.set()

        assert (found["signal"], found["level"]) == (number.name, "info")
        assert "psworker.Stopping" in found["effect"]
        assert "KeyboardInterrupt" in found["effect"]
        code, _, rest = finish(process)
        assert code == (130 if number == signal.SIGINT else 0)
        assert "leave_requested" not in rest


def test_a_second_sigterm_ends_a_worker_at_once(
    cluster: FakeCluster, script: "subprocess.Popen[str]"
) -> None:
    cluster.deal(*range(9))
    cluster.waits_for = "worker 9"
    cluster.wait_until(lambda: any(header.seq for header in cluster.received), 60)

    script.send_signal(signal.SIGTERM)
    seen = len(cluster.received)
    cluster.wait_until(lambda: len(cluster.received) > seen + 4)
    script.send_signal(signal.SIGTERM)

    assert finish(script) == (143, "step\n", "")
    assert cluster.left == {1: "drained", 2: "SystemExit: 143"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_joining_ends_a_script_at_once(
    tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "train.py").write_text(
        "import signal\nprint('reads its data', flush=True)\nwhile True: signal.pause()"
    )
    with subprocess.Popen(
        [sys.executable, "-P", "-c", RUN, str(tmp_path / "train.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'common'}"},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "reads its data\n"

        process.send_signal(number)

        assert finish(process) == (128 + number, "", "")


def test_ctrl_c_lets_a_worker_finish_its_step_and_exit_with_130(
    cluster: FakeCluster, script: "subprocess.Popen[str]"
) -> None:
    cluster.deal(*range(9))
    release, is_waiting = threading.Event(), threading.Event()
    cluster.before[0].extend([lambda: None] * 2 + [lambda: (is_waiting.set(), release.wait(30))[0]])
    assert is_waiting.wait(60)

    script.send_signal(signal.SIGINT)
    release.set()

    assert finish(script) == (130, "step\n", "")
    assert cluster.counted == [(1, 1)]
    assert cluster.left == {1: "", 2: ""}


def test_a_second_ctrl_c_ends_a_worker_at_once(
    cluster: FakeCluster, script: "subprocess.Popen[str]"
) -> None:
    cluster.deal(*range(9))
    cluster.waits_for = "worker 9"
    cluster.wait_until(lambda: any(header.seq for header in cluster.received), 60)

    script.send_signal(signal.SIGINT)
    seen = len(cluster.received)
    cluster.wait_until(lambda: len(cluster.received) > seen + 4)
    script.send_signal(signal.SIGINT)

    assert finish(script) == (130, "step\n", "")
    assert cluster.left == {1: "drained", 2: "KeyboardInterrupt: "}


LOADS = """
import torch, psworker

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 9
    def __getitem__(self, index):
        if index == 3:
            open("fetching", "w").close()
            while not os.path.exists("fetch"):
                threading.Event().wait(0.01)
        return torch.ones(1)

import os, threading
with psworker.connect() as job:
    net = torch.nn.Linear(1, 1)
    optimizer = job.optimizer(torch.optim.SGD(net.parameters(), lr=0.5), net)
    for x in job.batches(Slow(), 1, shuffle=False, num_workers=1, prefetch_factor=1):
        net(x).sum().backward()
        optimizer.step()
"""


def test_loader_processes_outlive_ctrl_c_until_their_worker_exits(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    """A terminal sends SIGINT to all processes; the worker may be waiting for the next batch."""
    cluster.deal(*range(9))
    (tmp_path / "train.py").write_text(LOADS)
    environment = {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'common'}",
        "PS_SERVERS": ",".join(cluster.addresses),
    }
    with subprocess.Popen(
        [sys.executable, "-P", "-c", RUN, "train.py"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        start_new_session=True,
    ) as process:
        cluster.wait_until(lambda: (tmp_path / "fetching").exists(), 60)

        os.killpg(process.pid, signal.SIGINT)
        (tmp_path / "fetch").touch()

        assert finish(process) == (130, "", "")
    assert len(cluster.counted) <= 3
