"""Leaving when asked: at the next step boundary, with nothing lost, and without waiting long for others."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pscommon.core.loop import LoopSpec
from pscommon.core.model import OptimizerSpec
from psproto.v1 import coordinator_pb2 as co
from psworker import drain
from psworker.client import Client
from psworker.drain import Drain, DrainedError
from psworker.job import Job
from psworker.optimizer import ServerOptimizer
from psworker.patience import Clock
from tests.psworker.fake_server import FakeCluster, lost

ROOT = Path(__file__).parents[2]
SGD = OptimizerSpec("sgd", ({"lr": 0.5},))
ONES = {"w": np.ones(50, np.float32)}
DATA = torch.arange(12.0).reshape(12, 1)


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(shards=2, lease=0.1) as cluster:
        yield cluster


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long for others."""
    monkeypatch.setattr(drain, "LONGEST_WAIT", 0.1)


def connect(cluster: FakeCluster) -> Client:
    client = Client(cluster.addresses, connect_timeout=20.0, wait_timeout=20.0)
    client.register(ONES, SGD)
    return client


@contextmanager
def started(cluster: FakeCluster, **options: Any) -> Iterator[tuple[Job, nn.Linear, ServerOptimizer]]:
    net = nn.Linear(1, 1)
    with Job(Client(cluster.addresses, connect_timeout=20.0, wait_timeout=20.0)) as job:
        yield job, net, job.optimizer(torch.optim.SGD(net.parameters(), lr=0.5), net, **options)


def train(job: Job, net: nn.Module, optimizer: ServerOptimizer, each: Callable[[int], object]) -> list[str]:
    """A loop; how each step ended. each: called before a step, with its number from 0."""
    results = []
    for step, (x,) in enumerate(job.batches((DATA,), 1)):
        each(step)
        net(x).sum().backward()
        optimizer.step()
        results.append(optimizer.result.status if optimizer.result else "")
    return results


def ask_at(when: int) -> Callable[[int], object]:
    return lambda step: drain.ask_all() if step == when else None


def test_who_was_asked_waits_some_time_more() -> None:
    now = [100.0]
    asked = Drain(Clock(lambda: now[0], lambda seconds: None))
    now[0] += 1000
    asked.check()
    assert not asked.asked

    asked.ask()
    now[0] += drain.LONGEST_WAIT - 0.1
    asked.ask()
    asked.check()
    now[0] += 0.1

    with pytest.raises(DrainedError) as caught:
        asked.check()
    assert (caught.value.exit_code, caught.value.reason) == (0, "DRAINED")


def test_only_workers_can_be_asked_and_once(cluster: FakeCluster) -> None:
    drain.ask_all()  # whom other tests in this process have left behind, not yet collected
    with Client(cluster.addresses, observe=True):
        assert not drain.ask_all()
    with Client(cluster.addresses) as client:
        assert drain.ask_all()
        assert client.draining
        assert not drain.ask_all()
    with Client(cluster.addresses):
        pass
    assert not drain.ask_all()


def test_a_heartbeat_brings_the_word(cluster: FakeCluster) -> None:
    with Client(cluster.addresses) as client:
        assert not client.stopping
        cluster.draining.add(1)
        seen = len(cluster.beats)
        cluster.wait_until(lambda: len(cluster.beats) > seen + 2)

        assert (client.stopping, client.draining) == (True, True)


def test_heartbeats_come_every_second_at_least() -> None:
    """Else a long lease would make for a long wait until a worker hears that it is to leave."""
    with FakeCluster(lease=3600) as cluster, Client(cluster.addresses):
        cluster.wait_until(lambda: len(cluster.beats) >= 2, seconds=5)


def test_a_script_that_does_not_look_ends_at_its_second_push(cluster: FakeCluster) -> None:
    def script() -> None:
        with connect(cluster) as client:
            drain.ask_all()
            while True:
                client.push(ONES)

    with pytest.raises(DrainedError, match="has made its last push"):
        script()

    assert cluster.counted == [(1, 1)]
    assert cluster.left == {1: ""}


@pytest.mark.usefixtures("quick")
def test_a_push_that_waits_for_others_is_given_up(cluster: FakeCluster) -> None:
    cluster.waits_for = "worker 9"
    with connect(cluster) as client:
        drain.ask_all()
        with pytest.raises(DrainedError, match="asked to leave"):
            client.push(ONES)

        assert max(header.wait_ms for header in cluster.received if header.seq) <= 100


@pytest.mark.usefixtures("quick")
def test_servers_that_are_gone_are_not_waited_for(cluster: FakeCluster) -> None:
    with connect(cluster) as client:
        cluster.before[0].extend([lost] * 100)
        drain.ask_all()
        with pytest.raises(DrainedError):
            client.pull()


@pytest.mark.parametrize("options", [{}, {"overlap": True}], ids=["whole", "overlap"])
def test_a_loop_ends_after_the_step_in_hand_and_the_script_runs_on(
    cluster: FakeCluster, options: dict[str, Any]
) -> None:
    """Its tests and reports still happen, but no round waits for it meanwhile."""
    cluster.deal(0, 1, 2, 3)
    with started(cluster, **options) as (job, net, optimizer):
        assert train(job, net, optimizer, ask_at(1)) == ["applied", "applied"]

        assert cluster.left == {1: ""}
        assert job.stopping
        assert train(job, net, optimizer, lambda step: None) == []
        job.pull()
        job.report(accuracy=0.5)
        assert cluster.calls["Register"] == 2
    assert cluster.metrics == {"accuracy": 0.5}
    assert cluster.left == {1: "", 2: ""}
    assert cluster.counted == [(1, 1), (1, 2)]


def test_batches_that_are_not_used_go_back(cluster: FakeCluster) -> None:
    cluster.deal(0, 1, 2, 3, 4, 5, 6)
    with started(cluster) as (job, net, optimizer):
        for step, (x,) in enumerate(job.batches((DATA,), 1, num_workers=1, prefetch_factor=3)):
            if step == 0:
                drain.ask_all()
            net(x).sum().backward()
            optimizer.step()

    assert cluster.counted == [(1, 1)]
    used = {batch.number for header in cluster.received for batch in header.batches}
    asked = len(cluster.asked)
    assert sorted({number for _, number in cluster.returned} | used) == list(range(asked))


def test_a_loop_that_the_script_leaves_itself_is_the_boundary_too(cluster: FakeCluster) -> None:
    cluster.deal(0, 1)
    with started(cluster) as (job, net, optimizer):
        for (x,) in job.batches((DATA,), 1):
            drain.ask_all()
            net(x).sum().backward()
            optimizer.step()
            if job.stopping:
                break

        assert cluster.left == {1: "drained"}


def test_a_script_that_fails_meanwhile_leaves_as_failed(cluster: FakeCluster) -> None:
    cluster.deal(0)

    def fail(step: int) -> None:
        drain.ask_all()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), started(cluster) as (job, net, optimizer):
        train(job, net, optimizer, fail)

    assert cluster.left[1] == "drained"
    assert cluster.left[2].startswith("ZeroDivisionError")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("options", [{}, {"overlap": True}], ids=["whole", "overlap"])
def test_a_step_that_waits_for_others_is_given_up_and_the_script_runs_on(
    cluster: FakeCluster, options: dict[str, Any]
) -> None:
    cluster.deal(0, 1, 2)

    def hold_up(step: int) -> None:
        if step == 1:
            cluster.waits_for = "worker 9"
            drain.ask_all()

    with started(cluster, **options) as (job, net, optimizer):
        assert train(job, net, optimizer, hold_up) == ["applied", "stale"]

        assert optimizer.result is not None
        assert optimizer.result.reason.startswith("DRAINED: asked to leave")
        assert cluster.left == {1: "drained"}
        assert cluster.returned == []
        job.report(accuracy=0.5)
    assert cluster.metrics == {"accuracy": 0.5}


@pytest.mark.usefixtures("quick")
def test_so_is_one_on_its_way_in_a_pipeline(cluster: FakeCluster) -> None:
    cluster.policy = "ssp"
    cluster.deal(0, 1)

    def hold_up(step: int) -> None:
        cluster.waits_for = "worker 9"
        drain.ask_all()

    with started(cluster, pipeline=True) as (job, net, optimizer):
        train(job, net, optimizer, hold_up)

        assert job.stats.stale == 1
        assert cluster.left == {1: "drained"}


def test_a_loop_of_the_scripts_own_that_does_not_look_ends_at_its_second_step(cluster: FakeCluster) -> None:
    def script() -> None:
        with started(cluster) as (_, net, optimizer):
            drain.ask_all()
            while True:
                net(DATA).sum().backward()
                optimizer.step()

    with pytest.raises(DrainedError, match=r"job\.stopping"):
        script()

    assert cluster.counted == [(1, 1)]
    assert cluster.left == {1: ""}


def test_who_waits_for_data_goes_with_the_next_answer(cluster: FakeCluster) -> None:
    cluster.batches.extend([co.NextBatchResponse(waiting_for="worker 9")] * 3)
    with connect(cluster) as client:
        cluster.control["NextBatch"].extend([lambda: None, drain.ask_all])

        lease = client.next_batches(LoopSpec(0, 4, 1), idle=True)

        assert (lease.numbers, lease.end, len(cluster.asked)) == ((), False, 2)


# ---- processes -------------------------------------------------------------------------------------------------------

RUN = "import sys; from psworker.script import Script, run; sys.exit(run(Script(sys.argv[1])))"

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


@pytest.fixture
def script(cluster: FakeCluster, tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A worker that trains against the cluster."""
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'common'}", "PS_SERVERS": ",".join(cluster.addresses)}
    with subprocess.Popen(
        [sys.executable, "-P", "-c", RUN, str(tmp_path / "train.py")],
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


def test_sigterm_lets_a_worker_end_its_step_and_its_script(
    cluster: FakeCluster, script: "subprocess.Popen[str]"
) -> None:
    cluster.deal(*range(9))
    hold, held = threading.Event(), threading.Event()
    cluster.before[0].extend([lambda: None] * 2 + [lambda: (held.set(), hold.wait(30))[0]])  # upload, pull, a push
    assert held.wait(60)

    script.send_signal(signal.SIGTERM)
    hold.set()

    assert finish(script) == (0, "step\nend\n", "")
    assert cluster.counted == [(1, 1)]
    assert cluster.left == {1: "", 2: ""}
    assert cluster.metrics == {"done": 1.0}


def test_a_second_sigterm_ends_it_at_once(cluster: FakeCluster, script: "subprocess.Popen[str]") -> None:
    cluster.deal(*range(9))
    cluster.waits_for = "worker 9"
    cluster.wait_until(lambda: any(header.seq for header in cluster.received), 60)

    script.send_signal(signal.SIGTERM)
    seen = len(cluster.received)
    cluster.wait_until(lambda: len(cluster.received) > seen + 4)
    script.send_signal(signal.SIGTERM)

    assert finish(script) == (143, "step\n", "")
    assert cluster.left == {1: "drained", 2: "SystemExit: 143"}
