"""The call stacks of a push and of a batch request stay short, and ARCHITECTURE.md lists them."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.call_paths import Path, RequestPaths, documented_path, recorded_paths
from tests.support.cluster import Cluster
from tests.support.lanes import each_lane
from tests.support.loader_script import train

Make = Callable[..., Cluster]

MAX_MODULES = 8
LARGE = 600  # the weights of a layer of this width exceed one message
CHOICES: dict[str, dict[str, Any]] = {
    "plain": {"overlap": False},
    "overlapped": {"overlap": True},
    "pipelined": {"pipeline": True},
    "reduced": {},
}


def modules(path: Path) -> list[str]:
    return list(dict.fromkeys(call.module for call in path))


def functions(path: Path) -> Path:
    """Return the functions without wrappers that torch requires."""
    return tuple(call for call in path if "<locals>" not in call.function)


def pushes(paths: RequestPaths, functions: tuple[str, ...]) -> list[Path]:
    """Return the exchanges that began in one of these functions."""
    return [path for path in paths.found["Exchange"] if path[0].function in functions]


STEP = "_step_of_torch.<locals>.step"
HOOK = "BucketSender._counter.<locals>.count_gradient"


@pytest.mark.every(4)
@pytest.mark.parametrize("choice", CHOICES)
@each_lane
@pytest.mark.parametrize(("shards", "width"), [(1, 3), (2, 3), (2, LARGE)])
def test_few_modules_are_on_the_path_of_a_push(
    cluster: Make,
    monkeypatch: pytest.MonkeyPatch,
    shards: int,
    width: int,
    lanes: str,
    choice: str,
) -> None:
    servers = cluster(shards, policy="allreduce" if choice == "reduced" else "async")
    with recorded_paths(monkeypatch) as paths:
        train(servers.addresses, lanes, width, **CHOICES[choice])
    found = pushes(paths, (STEP, HOOK))

    assert len(found) >= 2 * shards
    last = "grpc_exchanges" if lanes == "grpc" else "socket_connection"
    assert all(path[-1].module == f"psworker.transport.{last}" for path in found)
    for path in found:
        assert len(modules(path)) <= MAX_MODULES, "\n".join(map(str, path))


@pytest.mark.parametrize("lanes", ["stream", "shm"])
def test_the_path_of_a_push_is_documented(
    cluster: Make, monkeypatch: pytest.MonkeyPatch, lanes: str
) -> None:
    servers = cluster(1)
    with recorded_paths(monkeypatch) as paths:
        train(servers.address, lanes, 3, **CHOICES["plain"])

    assert {functions(path) for path in pushes(paths, (STEP,))} == {
        documented_path("Path of a push", "worker")
    }


def test_the_path_of_a_batch_request_is_documented(
    cluster: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = cluster(1)
    with recorded_paths(monkeypatch) as paths:
        train(servers.address, "grpc", 3, **CHOICES["plain"])
    found = paths.found["NextBatch"]

    for path in found:
        assert len(modules(path)) <= MAX_MODULES, "\n".join(map(str, path))
    assert functions(found[0]) == documented_path("Path of a batch request", "worker")
