"""psworker.connect: servers, PS_LOCAL, rank and device; the names of the package."""

import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest
import torch

import psworker
from psworker.client.local_client import LocalClient
from psworker.connect import choose_device


@pytest.fixture(autouse=True)
def _empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PS_SERVERS", "PS_LOCAL", "PS_DEVICE", "PS_WORKER_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_connect_without_servers_names_the_remedies() -> None:
    with pytest.raises(psworker.InvalidRequestError) as caught:
        psworker.connect()

    for way in ("ps-run", "ps-worker", "PS_SERVERS", "PS_LOCAL=1"):
        assert way in str(caught.value)


@pytest.mark.parametrize("word", ["0", "", "no", "off", "False"])
def test_ps_local_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    monkeypatch.setenv("PS_LOCAL", word)

    with pytest.raises(psworker.InvalidRequestError, match="no servers"):
        psworker.connect()


@pytest.mark.parametrize("word", ["1", "on", "YES", "true "])
def test_ps_local_can_be_switched_on(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    monkeypatch.setenv("PS_LOCAL", word)

    assert psworker.connect().policy == "local"


def test_an_invalid_ps_local_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PS_LOCAL", "2")

    with pytest.raises(psworker.InvalidRequestError, match="PS_LOCAL=2 is not valid"):
        psworker.connect()


def test_rank_and_device_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PS_LOCAL", "1")
    monkeypatch.setenv("PS_WORKER_RANK", "3")
    monkeypatch.setenv("PS_DEVICE", "cpu")

    job = psworker.connect()

    assert (job.rank, job.device) == (3, torch.device("cpu"))
    job.close()
    assert psworker.connect(rank=1).rank == 1


def test_an_invalid_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PS_WORKER_RANK", "first")

    with pytest.raises(psworker.InvalidRequestError, match="PS_WORKER_RANK"):
        psworker.connect()


def test_workers_are_spread_over_gpus_and_auto_falls_back_to_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [str(choose_device("auto", rank)) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert [str(choose_device("cuda", rank)) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert choose_device("cuda:1", 0) == torch.device("cuda:1")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", 0) == torch.device("cpu")
    with pytest.raises(psworker.InvalidRequestError, match=r"cuda:1.*sees 0 GPUs"):
        choose_device("cuda:1", 0)


def test_device_cpu_does_not_query_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """After such a query, forks of the process cannot use a GPU."""
    monkeypatch.delattr(torch.cuda, "is_available")

    assert choose_device("cpu", 0) == torch.device("cpu")


@pytest.mark.parametrize("device", ["gpu", "meta", "cuda:x"])
def test_unknown_devices_are_refused(device: str) -> None:
    with pytest.raises(psworker.InvalidRequestError, match="auto, cpu, cuda"):
        psworker.connect(device=device)


def test_importing_the_package_loads_neither_torch_nor_grpc() -> None:
    code = "import sys, psworker; sys.exit(len({'torch', 'grpc', 'numpy'} & sys.modules.keys()))"

    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_the_package_exports_the_public_names() -> None:
    from psworker.core.results import PushResult
    from psworker.job import Job

    assert psworker.Job is Job
    assert psworker.PushResult is PushResult
    assert callable(psworker.connect)
    assert {*psworker.__all__, "__version__"} <= set(dir(psworker))
    assert psworker.__version__ == version("paramserver")
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = psworker.Nothing


def test_an_optimizer_spec_takes_keywords() -> None:
    spec = psworker.OptimizerSpec("adam", lr=1e-3, betas=(0.9, 0.99))

    assert spec.as_dict() == {"name": "adam", "groups": [{"lr": 1e-3, "betas": (0.9, 0.99)}]}


@pytest.mark.parametrize(("given", "seen"), [("10.0.0.1:5", "10.0.0.1:5"), (None, None)])
def test_connect_passes_its_arguments_to_the_client(
    monkeypatch: pytest.MonkeyPatch, given: str | None, seen: str | None
) -> None:
    """Without servers it passes None; the client then reads the environment."""
    calls: list[tuple[Any, dict[str, Any]]] = []

    class Connected(LocalClient):
        worker = 5

        def __init__(self, servers: Any, **options: Any) -> None:
            super().__init__()
            calls.append((servers, options))

    monkeypatch.setenv("PS_SERVERS", "10.0.0.2:5")
    monkeypatch.setattr("psworker.client.client.Client", Connected)

    job = psworker.connect(given, device="cpu", connect_timeout=3.0, wait_timeout=4.0)

    limits = {"connect_timeout": 3.0, "wait_timeout": 4.0}
    assert calls == [(seen, {"rank": None, "device": "cpu", **limits, "training": "0"})]
    assert job.rank == 4
