"""Commands that find a running job without its address, and the settings that it reports."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pscommon.system.local_jobs import local_jobs
from psworker import Client
from psworker.ctl.cli import main as ps_ctl
from tests.support.cluster import Cluster

Make = Callable[..., Cluster]
Output = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _no_external_settings_or_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither settings nor jobs from outside."""
    for name in ("PS_PS", "PS_SERVERS", "PS_OUTPUT", "PS_JOB"):
        monkeypatch.delenv(name, raising=False)
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def settings_of(capsys: Output, *args: str) -> dict[str, tuple[Any, str]]:
    assert ps_ctl([*args, "config", "--output", "json"]) == 0
    return {
        row["key"]: (row["value"], row["source"]) for row in json.loads(capsys.readouterr().out)
    }


def test_shard_0_announces_its_job_while_it_runs(cluster: Make, capsys: Output) -> None:
    made = cluster(2, job="mine")

    assert [(found.job, found.address) for found in local_jobs()] == [("mine", made.address)]
    assert ps_ctl(["status", "--output", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["job"] == "mine"
    with Client(observe=True) as client:
        assert client.job == "mine"

    made.close()
    assert local_jobs() == []


def test_an_unusable_folder_costs_only_the_announcement(cluster: Make, tmp_path: Path) -> None:
    (tmp_path / "paramserver").write_text("a file")
    made = cluster(1)

    assert ps_ctl(["--ps", made.address, "status"]) == 0


def test_config_shows_the_settings_of_the_servers(
    cluster: Make, tmp_path: Path, capsys: Output
) -> None:
    made = cluster(2, job="mine", lease=7.0, data_dir=tmp_path / "data")

    found = settings_of(capsys, "--ps", made.address)
    assert found["job"] == ("mine", "shard 0")
    assert found["shards"] == (2, "shard 0")
    assert found["lease"] == (7.0, "shard 0")
    assert found["policy"] == ("sync", "shard 0")
    assert found["data_dir"] == (str((tmp_path / "data").resolve()), "shard 0")
    assert found["snapshot_every"] == ("60s", "shard 0")
    assert "bind" not in found

    assert ps_ctl(["--ps", made.address, "policy", "set", "ssp", "--staleness", "3"]) == 0
    capsys.readouterr()
    found = settings_of(capsys, "--ps", made.address)
    assert found["policy"] == ("ssp", "policy set")
    assert found["staleness"] == (3, "policy set")
    assert found["lease"] == (7.0, "shard 0")
