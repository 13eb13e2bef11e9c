"""ps-ctl snapshot against running servers: save, list, verify and export."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch

from pscommon.snapshot import SnapshotDirectory
from psworker.ctl.cli import main as ps_ctl
from tests.support.cluster import Cluster
from tests.support.ctl_output import Output, ctl
from tests.support.snapshot_files import flip
from tests.support.workers import (
    count,
    counter,
    network,
    train,
    weights_of,
)

Make = Callable[..., Cluster]


@pytest.fixture(autouse=True)
def _no_external_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PS_PS", "PS_SERVERS", "PS_OUTPUT", "PS_TIMEOUT", "PS_CONFIG", "PS_LEASE"):
        monkeypatch.delenv(name, raising=False)


def test_snapshots_are_saved_listed_verified_and_exported(
    cluster: Make, capsys: Output, tmp_path: Path
) -> None:
    servers, job = cluster(2, min_workers=2, data_dir=tmp_path / "job"), tmp_path / "job"
    train(servers.address, stop_at=3)

    saved = ctl(capsys, "--ps", servers.servers[1].address, "snapshot", "save")
    live = ctl(capsys, "--ps", servers.address, "snapshot", "list")
    weights = weights_of(servers.address)
    servers.close()
    offline = ctl(capsys, "snapshot", "list", job)
    verified = ctl(capsys, "snapshot", "verify", job)
    exported = ctl(capsys, "snapshot", "export", job, tmp_path / "model.safetensors")

    assert saved == {"version": 3, "path": str(SnapshotDirectory(job).path(3))}
    assert [(row["version"], row["state"]) for row in live + offline] == [(3, "complete")] * 2
    assert [(row["version"], row["problems"]) for row in verified] == [(3, [])]
    assert exported["version"] == 3
    model = network()
    model.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))
    for name, tensor in model.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), weights[name])


def test_verify_finds_a_flipped_byte(cluster: Make, capsys: Output, tmp_path: Path) -> None:
    servers = cluster(2, data_dir=tmp_path)
    with counter(servers.address) as client:
        count(client)
    ctl(capsys, "--ps", servers.address, "snapshot", "save")
    (part,) = SnapshotDirectory(tmp_path).path(1).glob("shard-1-*")
    flip(part)

    assert ps_ctl(["snapshot", "verify", str(tmp_path)]) == 12
    assert part.name in capsys.readouterr().out


def test_save_without_a_data_directory_is_refused(cluster: Make, capsys: Output) -> None:
    assert ps_ctl(["--ps", cluster(1).address, "snapshot", "save"]) == 12

    assert "no --data-dir" in capsys.readouterr().err
