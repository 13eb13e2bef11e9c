"""Data directories that earlier releases wrote replay to the same weights
(tests/fixtures/data_directories).
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster
from tests.support.snapshot_files import FIXTURES, unpack
from tests.support.workers import digest, status

NAMES = ("sync-adam-1", "sync-momentum-2", "async-clip-2", "failed-command-1")

Make = Callable[..., Cluster]


def expected(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FIXTURES / f"{name}.json").read_text())
    return found


def restored(cluster: Make, name: str, folder: Path) -> dict[str, Any]:
    """What servers of today make of it; the keys are those of the JSON file."""
    settings, data_dir = expected(name), unpack(name, folder)
    options = {"data_dir": data_dir, "durability": "log", **settings["settings"]}
    servers = cluster(settings["shards"], **options)
    weights, found = digest(servers.address), status(servers.address)
    data = [
        {key: row[key] for key in ("loop", "committed", "dropped", "ended")}
        for row in found["data"]
    ]
    kept = {key: found[key] for key in ("version", "samples", "pushes")}
    return {
        **{key: settings[key] for key in ("shards", "settings")},
        **kept,
        "weights_sha256": weights,
        "data": data,
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_data_directory_of_an_earlier_release_replays_to_the_same_weights(
    cluster: Make, tmp_path: Path, name: str
) -> None:
    assert restored(cluster, name, tmp_path) == expected(name)


@pytest.mark.parametrize("name", NAMES)
def test_a_data_directory_replays_again_after_a_crash_of_the_new_servers(
    cluster: Make, tmp_path: Path, name: str
) -> None:
    """The new servers began segments of their own."""
    settings, data_dir = expected(name), unpack(name, tmp_path)
    options = {"data_dir": data_dir, "durability": "log", **settings["settings"]}
    for _ in range(2):
        servers = cluster(settings["shards"], **options)
        assert digest(servers.address) == settings["weights_sha256"]
        assert status(servers.address)["version"] == settings["version"]
        servers.close()
