"""How many workers a server serves by default, and the limit of open files behind it."""

import resource
import subprocess
import sys
from typing import Any

import pytest

from pscommon.system.process_limits import raise_file_limit
from psserver.process import config
from psserver.process.config import ServerConfig

LOW = 300


@pytest.mark.parametrize(
    ("lanes", "files", "workers"),
    [
        ("auto", 20_256, 3333),
        ("stream", 1024, 128),
        ("shm", 256 + 6 * 5000, 5000),
        ("grpc", 256 + 6 * 959, 959),
        ("grpc", 1 << 20, 960),  # each call that waits occupies one of 1024 threads
        ("auto", 256, 1),
        ("grpc", 10, 1),
    ],
)
def test_open_files_and_the_threads_of_grpc_limit_the_workers(
    monkeypatch: pytest.MonkeyPatch, lanes: Any, files: int, workers: int
) -> None:
    monkeypatch.setattr(config, "raise_file_limit", lambda: files)

    assert ServerConfig(lanes=lanes).max_workers == workers
    assert ServerConfig(lanes=lanes, max_workers=7).max_workers == 7


def test_a_system_without_a_limit_counts_as_a_million_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: unlimited)

    assert raise_file_limit() == 1 << 20


def test_a_limit_that_cannot_be_raised_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(kind: int, limits: tuple[int, int]) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (LOW, 1 << 16))
    monkeypatch.setattr(resource, "setrlimit", refuse)

    assert raise_file_limit() == LOW


CHILD = f"""
import resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, ({LOW}, hard))
from psserver.process.config import ServerConfig
ServerConfig(max_workers=%s)
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
"""


@pytest.mark.parametrize("max_workers", [None, 500])
def test_a_server_raises_its_limit_of_open_files(max_workers: int | None) -> None:
    """Also if the user sets the number of workers."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] in range(LOW + 1):
        pytest.skip("the system allows no more open files")

    subprocess.run([sys.executable, "-c", CHILD % max_workers], check=True, timeout=60)
