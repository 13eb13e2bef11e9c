"""Each setting of ps-worker changes what a worker does."""

import json
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

import psworker
from pscommon.core.errors import InvalidRequestError, MismatchError, UnreachableError
from psworker import cli
from tests.support.cluster import Cluster
from tests.support.malloc_probe import MAPPED
from tests.support.programs import Program, Programs, programs_in
from tests.support.settings_coverage import worker_setting
from tests.support.workers import ONES, status, until

Make = Callable[..., Cluster]
WorkerSettings = Callable[..., None]


ZEROS = {name: np.zeros_like(one) for name, one in ONES.items()}


@pytest.fixture
def use_settings(monkeypatch: pytest.MonkeyPatch) -> WorkerSettings:
    """Return a function that gives this process the settings of ps-worker with some flags."""

    def tell(*flags: object) -> None:
        for name in [name for name in os.environ if name.startswith("PS_")]:
            monkeypatch.delenv(name)
        environment: dict[str, str] = {}
        with cli.COMMAND.make_context("ps-worker", [*map(str, flags), "train.py"]) as ctx:
            cli.export(ctx.params, environment)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    return tell


@worker_setting("ps")
def test_ps(cluster: Make, use_settings: WorkerSettings) -> None:
    for name in ("otter", "stoat"):
        use_settings("--ps", cluster(1, job=name).address)
        with psworker.Client() as client:
            assert client.job == name


@worker_setting("worker_rank")
def test_worker_rank(cluster: Make, use_settings: WorkerSettings) -> None:
    address = cluster(1).address
    use_settings("--ps", address, "--worker-rank", 5)

    with psworker.connect() as job:
        assert job.rank == 5
    assert [row["rank"] for row in status(address)["workers"]] == [5]


@worker_setting("worker_count")
def test_worker_count(use_settings: WorkerSettings) -> None:
    """It is for the script alone."""
    use_settings("--ps", "127.0.0.1:1", "--worker-count", 4)

    assert os.environ["PS_WORKER_COUNT"] == "4"


@worker_setting("job")
def test_job(cluster: Make, use_settings: WorkerSettings) -> None:
    """A worker of another job cannot take part."""
    use_settings("--ps", cluster(1, job="otter").address, "--job", "stoat")

    with pytest.raises(MismatchError, match="otter, not stoat") as caught:
        psworker.Client()

    assert caught.value.exit_code == 11


@worker_setting("device")
def test_device(cluster: Make, use_settings: WorkerSettings) -> None:
    address = cluster(1).address
    use_settings("--ps", address, "--device", "cpu")
    with psworker.connect() as job:
        assert str(job.device) == "cpu"

    with pytest.raises(InvalidRequestError, match=r"device cuda:99 .*: torch .* sees"):
        use_settings("--ps", address, "--device", "cuda:99")


@worker_setting("connect_timeout")
def test_connect_timeout(use_settings: WorkerSettings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        unused_address = f"127.0.0.1:{probe.getsockname()[1]}"
    use_settings("--ps", unused_address, "--connect-timeout", "200ms")

    began = time.monotonic()
    with pytest.raises(UnreachableError, match=unused_address):
        psworker.connect()

    assert time.monotonic() - began < 10


@worker_setting("lanes")
@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ([], set()),
        (["--lanes", "grpc"], {"shm"}),
        (["--lanes", "stream"], {"grpc", "shm"}),
        (["--lanes", "shm"], {"grpc", "stream"}),
    ],
)
def test_lanes(
    cluster: Make, use_settings: WorkerSettings, flags: list[object], refused: set[str]
) -> None:
    """Which servers with a single lane a worker cannot train with."""
    for lanes in ("grpc", "stream", "shm"):
        use_settings("--ps", cluster(1, lanes=lanes).address, *flags)
        expected = (
            pytest.raises(InvalidRequestError, match="--lanes")
            if lanes in refused
            else nullcontext()
        )
        with psworker.Client() as client, expected:
            client.register(ZEROS, psworker.OptimizerSpec("sgd", lr=1.0))
            assert client.push(ONES).status == "applied"


@worker_setting("overlap")
@pytest.mark.parametrize(
    ("flags", "early"), [([], False), (["--overlap", "off"], False), (["--overlap", "on"], True)]
)
def test_overlap(
    cluster: Make, use_settings: WorkerSettings, flags: list[object], early: bool
) -> None:
    """Whether a push begins before step(): over gRPC an open one takes memory."""
    servers = cluster(1, lanes="grpc")
    budget = servers.servers[0].engine.traffic.budget
    use_settings("--ps", servers.address, "--device", "cpu", *flags)
    with psworker.connect() as job:
        model = torch.nn.Linear(10, 10)
        optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for _ in range(2):
            model(torch.ones(10)).sum().backward()
            if early:
                until(lambda: budget.used > 0, "a push under way")
            assert budget.used == (512 if early else 0)
            optimizer.step()
            optimizer.zero_grad()
        job.wait()


# ---- settings of a process -----------------------------------------------------------------------

SCRIPT = (
    MAPPED
    + """
import json, logging, sys, urllib.request, torch
log = logging.getLogger("psworker.script")
log.debug("a detail")
log.warning("a warning")
found = {"threads": torch.get_num_threads(), "alive": None, "mapped": mapped()}
if len(sys.argv) > 1:
    answer = urllib.request.urlopen(f"http://{sys.argv[1]}/livez", timeout=20)
    found["alive"] = answer.read().decode()
print(json.dumps(found))
"""
)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Program, Program]]:
    """Run two workers (without servers) to their end."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    text = (
        "--threads",
        3,
        "--log-level",
        "debug",
        "--log-format",
        "text",
        "--metrics-bind",
        address,
    )
    with programs_in(tmp_path_factory.mktemp("workers")) as programs:
        programs.script(SCRIPT)
        first = local(programs, *text, "train.py", address)
        json_log = ("--log-level", "warning", "--log-format", "json")
        second = local(programs, "--threads", 1, *json_log, "train.py")
        assert (first.wait(), second.wait()) == (0, 0), first.output + second.output
        yield first, second


def local(programs: Programs, *args: object) -> Program:
    return programs.start("ps-worker", *args, PS_LOCAL=1)


def found(program: Program) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(program.out)
    return document


@pytest.mark.full
@worker_setting("threads")
def test_threads(two: tuple[Program, Program]) -> None:
    assert [found(worker)["threads"] for worker in two] == [3, 1]


@pytest.mark.full
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_large_buffers_are_reused(two: tuple[Program, Program]) -> None:
    assert [found(worker)["mapped"] for worker in two] == [False, False]


@worker_setting("metrics_bind")
def test_metrics_bind(two: tuple[Program, Program]) -> None:
    assert found(two[0])["alive"] == "alive\n"


@worker_setting("log_level")
def test_log_level(two: tuple[Program, Program]) -> None:
    assert ["a detail" in worker.err for worker in two] == [True, False]


@worker_setting("log_format")
def test_log_format(two: tuple[Program, Program]) -> None:
    text, lines = (worker.err for worker in two)

    assert "[warning] a warning" in text.replace("  ", " ")
    assert json.loads(lines)["event"] == "a warning"
