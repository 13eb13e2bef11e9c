"""Data directories of earlier releases replay to the same weights.

tests/fixtures/data_directories has the recordings.
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
    job_status: dict[str, Any] = json.loads((FIXTURES / f"{name}.json").read_text())
    return job_status


def restored_state(cluster: Make, name: str, folder: Path) -> dict[str, Any]:
    """Start servers on the data directory; return their state with the keys of the JSON file."""
    settings, data_dir = expected(name), unpack(name, folder)
    options = {"data_dir": data_dir, "durability": "log", **settings["settings"]}
    servers = cluster(settings["shards"], **options)
    weights, job_status = digest(servers.address), status(servers.address)
    data = [
        {key: row[key] for key in ("loop", "committed", "dropped", "ended")}
        for row in job_status["data"]
    ]
    counts = {key: job_status[key] for key in ("version", "samples", "pushes")}
    return {
        **{key: settings[key] for key in ("shards", "settings")},
        **counts,
        "weights_sha256": weights,
        "data": data,
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_data_directory_replays_to_the_same_weights(
    cluster: Make, tmp_path: Path, name: str
) -> None:
    assert restored_state(cluster, name, tmp_path) == expected(name)


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_data_directory_replays_again_after_a_crash(
    cluster: Make, tmp_path: Path, name: str
) -> None:
    """The current servers have started log segments of their own."""
    settings, data_dir = expected(name), unpack(name, tmp_path)
    options = {"data_dir": data_dir, "durability": "log", **settings["settings"]}
    for _ in range(2):
        servers = cluster(settings["shards"], **options)
        assert digest(servers.address) == settings["weights_sha256"]
        assert status(servers.address)["version"] == settings["version"]
        servers.close()
