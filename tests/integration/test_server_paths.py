"""The call stacks inside the servers stay short, and ARCHITECTURE.md lists them."""

from collections.abc import Callable

import pytest

from psserver.core.commands.data_commands import LeaseBatches
from psserver.core.commands.shard_commands import ProcessReport
from psserver.durability.shard_state import ShardState
from psserver.parameters.store import ParameterStore
from tests.support.call_paths import Path, documented_path, recorded_calls
from tests.support.cluster import Cluster
from tests.support.loader_script import train

Make = Callable[..., Cluster]

SERVER = ("psserver",)


def from_function(path: Path, function: str) -> Path | None:
    """Return the path from this function on; None if it is not on the path."""
    names = [call.function for call in path]
    return path[names.index(function) :] if function in names else None


def modules(path: Path) -> set[str]:
    """Return the modules on a path outside of the pure core."""
    return {call.module for call in path if not call.module.startswith("psserver.core.")}


@pytest.mark.parametrize(
    ("documented", "first", "last", "most_modules"),
    [
        (
            ("Path of a push", "shard: staging"),
            "Exchange.run",
            (ShardState, "stage"),
            4,
        ),
        (
            ("Path of a push", "coordinator"),
            "ShardListener.handle",
            (ProcessReport, "perform"),
            3,
        ),
        (
            ("Path of a push", "shard: update"),
            "CoordinatorLink._deliver",
            (ParameterStore, "apply"),
            4,
        ),
        (
            ("Path of a batch request", "coordinator"),
            "next_batch",
            (LeaseBatches, "perform"),
            4,
        ),
    ],
)
def test_a_path_through_a_server_is_documented(
    cluster: Make,
    monkeypatch: pytest.MonkeyPatch,
    documented: tuple[str, str],
    first: str,
    last: tuple[type, str],
    most_modules: int,
) -> None:
    servers = cluster(2, policy="async")
    with recorded_calls(monkeypatch, *last, SERVER) as paths:
        train(servers.addresses, "stream", 3, overlap=False)
    found = {path for each in paths if (path := from_function(each, first)) is not None}

    assert found == {documented_path(*documented)}
    assert all(len(modules(path)) <= most_modules for path in found)
