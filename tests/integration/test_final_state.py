"""The files on disk when a job has ended, and exit code 15 if they lack something requested."""

import errno
import json
import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pscommon.core.errors import InvalidRequestError, NonFiniteError, NotSavedError
from pscommon.settings.values import SnapshotEvery
from pscommon.snapshot.atomic_files import AtomicFiles
from pscommon.wal.segment import LogFiles
from psserver.coordinator.final_state import NOT_SAVED_FILE, conclude
from psserver.coordinator.service import CoordinatorService
from psserver.process.config import ServerConfig
from psserver.server import Server
from psworker.run.summary import NOT_SAVED
from tests.support.cluster import Cluster
from tests.support.events import events, records_of
from tests.support.programs import Programs, programs_in
from tests.support.settings_coverage import server_setting
from tests.support.workers import count, counted, counter, until

Make = Callable[..., Cluster]
RARELY = SnapshotEvery(seconds=3600)


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture(autouse=True)
def _no_retry_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psserver.coordinator.snapshot_jobs.RETRY_PAUSE_SECONDS", 0.0)


@pytest.fixture
def failing_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk refuse every part of a snapshot."""
    monkeypatch.setattr(AtomicFiles, "save", refuse)


def ended(servers: Cluster, pushes: int = 2, reason: str = "done", *, ends_job: bool = True) -> str:
    """Train, end the job, and return what is not saved."""
    service = servers.servers[0].service
    assert service is not None
    with counter(servers.address) as client:
        count(client, pushes)
    service.stop(reason, ends_job=ends_job)
    assert servers.servers[0].ended.wait(30)
    return servers.servers[0].not_saved


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return events(caplog, logging.ERROR)


# ---- the last snapshot or a log ------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["snapshot", "log"])
def test_a_job_with_its_final_state_on_disk_has_saved_everything(
    cluster: Make, tmp_path: Path, durability: str
) -> None:
    assert ended(cluster(2, data_dir=tmp_path, durability=durability)) == ""


def test_without_a_data_directory_nothing_must_be_saved(cluster: Make) -> None:
    assert ended(cluster(2)) == ""


def test_a_job_without_weights_has_nothing_to_save(cluster: Make, tmp_path: Path) -> None:
    servers = cluster(1, data_dir=tmp_path, save=tmp_path / "f")
    servers.stop()
    assert not (tmp_path / "f").exists()


@pytest.mark.usefixtures("failing_snapshots")
def test_a_failed_last_snapshot_is_reported_and_leaves_no_folder(
    cluster: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = ended(cluster(2, data_dir=tmp_path))

    assert text.startswith("version 2 is not saved, and there is no snapshot: ")
    assert text.count("No space left on device") == 1
    # from the snapshot that follows the last worker
    assert errors(caplog) in (
        [],
        ["snapshot_failed"],
    )
    assert not (tmp_path / "snapshots").exists()


def test_an_older_snapshot_is_reported(
    cluster: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = cluster(1, data_dir=tmp_path, snapshot_every=RARELY)
    service = servers.servers[0].service
    assert service is not None
    with counter(servers.address) as client:
        count(client)
        assert service.snapshot_scheduler.save(30) == 1
        monkeypatch.setattr(AtomicFiles, "save", refuse)
        count(client)
    service.stop("done")
    assert servers.servers[0].ended.wait(30)

    assert servers.servers[0].not_saved.startswith(
        "version 2 is not saved, and the newest snapshot is of version 1: "
    )


@pytest.mark.usefixtures("failing_snapshots")
def test_a_complete_log_is_sufficient(
    cluster: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    servers = cluster(2, data_dir=tmp_path, durability="log", snapshot_every=RARELY)
    assert ended(servers) == ""
    assert "last_snapshot_missing" in events(caplog)
    servers.close()

    again = cluster(2, data_dir=tmp_path, durability="log", snapshot_every=RARELY)
    with counter(again.address) as client:
        assert counted(client.pull()) == 2


@pytest.mark.usefixtures("failing_snapshots")
@pytest.mark.parametrize("broken", ["log-job", "log-shard-0", "log-shard-1"])
def test_an_incomplete_log_is_not_sufficient(
    cluster: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    broken: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log of any shard may be incomplete; its failure is logged once."""
    write = LogFiles.write

    def refuse_one(files: LogFiles, descriptor: int, *rest: Any) -> Any:
        if f"/{broken}/" in os.readlink(f"/proc/self/fd/{descriptor}"):
            refuse()
        return write(files, descriptor, *rest)

    servers = cluster(2, data_dir=tmp_path, durability="log", snapshot_every=RARELY)
    with counter(servers.address) as client:
        count(client)
    monkeypatch.setattr(LogFiles, "write", refuse_one)

    assert "version 3 is not saved" in ended(servers)
    reported = [record.__dict__["folder"] for record in records_of(caplog, "log_unwritable")]
    assert reported == [str(tmp_path / broken)]


@pytest.mark.usefixtures("failing_snapshots")
def test_a_shard_without_a_log_makes_the_log_incomplete(cluster: Make, tmp_path: Path) -> None:
    settings = {"data_dir": tmp_path, "snapshot_every": RARELY}
    servers = cluster(0)
    servers.add(0, 2, durability="log", **settings)
    servers.add(1, 2, **settings)

    assert "version 2 is not saved" in ended(servers)


def test_a_shard_missing_at_the_end_is_reported(cluster: Make, tmp_path: Path) -> None:
    servers = cluster(2, data_dir=tmp_path, snapshot_every=RARELY, save=tmp_path / "f", lease=30.0)
    service = servers.servers[0].service
    assert service is not None
    with counter(servers.address) as client:
        count(client)
        servers.servers.pop().close()
        until(lambda: service.directory.missing, "a shard that is gone")
        service.stop("done", ends_job=False)
        assert servers.servers[0].ended.wait(30)

    text = servers.servers[0].not_saved
    assert "version 1 is not saved" in text
    assert f"--save {tmp_path / 'f'}: a shard is missing: shard 1" in text


def test_a_promoted_standby_without_the_data_directory_has_not_saved(cluster: Make) -> None:
    servers, problem = cluster(0), "this server continued without /data, which cannot be used"
    servers.servers.append(Server(ServerConfig(bind="127.0.0.1:0"), lost_data_dir=problem))
    servers.servers[0].start()

    assert ended(servers) == problem


def test_exit_code_15_replaces_only_0(caplog: pytest.LogCaptureFixture) -> None:
    """Other exit codes take precedence over 15."""
    assert conclude(None, "", 0) == 0
    with pytest.raises(NotSavedError, match="the disk is full") as caught:
        conclude(None, "the disk is full", 0)
    assert (caught.value.exit_code, caught.value.reason) == (15, "NOT_SAVED")
    assert errors(caplog) == []  # the last line of the command has the error

    assert conclude(None, "the disk is full", 128 + signal.SIGTERM) == 143
    with pytest.raises(NonFiniteError):
        conclude(NonFiniteError("NaN"), "the disk is full", 0)
    assert errors(caplog) == ["final_weights_not_saved"] * 2


def test_an_incomplete_snapshot_is_awaited_no_longer_than_the_limit(
    cluster: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psserver.coordinator.snapshot_jobs.LAST_SNAPSHOT_SECONDS", 0.2)
    servers = cluster(1, data_dir=tmp_path, snapshot_every=RARELY)
    # the part is never reported as written
    monkeypatch.setattr(CoordinatorService, "record_part", lambda service, part: None)

    assert ended(servers).endswith(": no snapshot was written within 0.2 s")


def test_a_failed_write_of_the_file_for_ps_run_has_no_other_effect(
    cluster: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(NOT_SAVED_FILE, str(tmp_path / "missing" / "file"))

    assert ended(cluster(1, save=tmp_path / "f")) == ""
    assert "result_file_unwritable" in events(caplog)


@pytest.mark.usefixtures("failing_snapshots")
def test_a_file_reports_the_final_state_to_ps_run(
    cluster: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported = tmp_path / "not-saved"
    monkeypatch.setenv(NOT_SAVED_FILE, str(reported))
    text = ended(cluster(1, data_dir=tmp_path / "data"), reason="SIGTERM", ends_job=False)

    assert text
    assert reported.read_text() == text


# ---- --save --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends_job", [True, False])
@pytest.mark.parametrize("shards", [1, 3])
def test_the_newest_weights_of_all_shards_are_written(
    cluster: Make, tmp_path: Path, shards: int, ends_job: bool
) -> None:
    """Also if only the servers stop, and without a data directory."""
    assert ended(cluster(shards, save=tmp_path / "f"), pushes=3, ends_job=ends_job) == ""

    found = load_file(tmp_path / "f")
    assert {name: tensor.shape for name, tensor in found.items()} == {"a": (3, 40), "b": (100,)}
    assert counted({name: tensor.numpy() for name, tensor in found.items()}) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_a_failed_write_of_the_weights_is_reported_and_keeps_the_older_file(
    cluster: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "f"
    file.write_text("older")
    servers = cluster(2, data_dir=tmp_path / "data", save=file)
    save = AtomicFiles.save

    def refuse_export(files: AtomicFiles, path: Path, *rest: Any) -> Any:
        return refuse() if "export" in path.parent.name else save(files, path, *rest)

    monkeypatch.setattr(AtomicFiles, "save", refuse_export)
    assert f"--save {file}: cannot write {file}: No space left on device" in ended(servers)
    assert file.read_text() == "older"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "f"]


def test_an_invalid_path_for_the_weights_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"--save .*: the folder .* does not exist"):
        ServerConfig(save=tmp_path / "missing" / "f")
    with pytest.raises(InvalidRequestError, match=r"--save .*: it is a folder"):
        ServerConfig(save=tmp_path)
    assert (
        ServerConfig(shard=1, shards=2, save=tmp_path).save == tmp_path
    )  # only shard 0 writes the file


# ---- ps-run --------------------------------------------------------------------------------------

SCRIPT = """
import os, shutil, signal, sys, torch, psworker
from torch import nn
from torch.utils.data import TensorDataset
with psworker.connect() as job:
    torch.manual_seed(0)
    layers = (nn.Linear(2, 2, bias=False) for _ in range(2))
    model = nn.Sequential(*layers, nn.BatchNorm1d(2))
    model[1].weight = model[0].weight
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for (x,) in job.batches(TensorDataset(torch.randn(8, 2)), batch_size=2):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if sys.argv[1:] == ["waits"]:
            print("waits", flush=True)
            signal.pause()
    if sys.argv[1:] == ["breaks"]:
        shutil.rmtree("data/snapshots", ignore_errors=True)
        open("data/snapshots", "w").close()  # where a folder has to be
    torch.save(model.state_dict(), "expected.pt")
"""


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with programs_in(tmp_path) as programs:
        programs.script(SCRIPT)
        yield programs


def summary(programs: Programs) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((programs.folder / "s.json").read_text())
    return found


@server_setting("save")  # ps-run passes it to shard 0
def test_ps_run_saves_the_trained_weights(programs: Programs) -> None:
    """Under all names of the state_dict, without a data directory."""
    flags = ("--servers", 2, "--summary", "s.json", "--save", "model.safetensors")
    program = programs.run("ps-run", *flags, "train.py")

    assert program.wait() == 0, program.output
    assert summary(programs)["saved"] is True
    expected = torch.load(programs.folder / "expected.pt", weights_only=True)
    found = load_file(programs.folder / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_ps_run_saves_the_weights_when_it_is_interrupted(programs: Programs) -> None:
    program = programs.start(
        "ps-run", "--summary", "s.json", "--save", "model.safetensors", "train.py", "waits"
    )
    program.wait_for("waits")
    program.send(signal.SIGTERM)

    assert program.wait() == 143, program.output
    assert (summary(programs)["status"], summary(programs)["saved"]) == ("interrupted", True)
    assert "0.weight" in load_file(programs.folder / "model.safetensors")


def test_ps_run_exits_with_15_if_no_snapshot_has_the_final_state(programs: Programs) -> None:
    """The reason is in one line of s0."""
    flags = ("--data-dir", "data", "--snapshot-every", "1h", "--summary", "s.json")
    program = programs.run("ps-run", *flags, "train.py", "breaks")

    assert program.wait() == 15, program.output
    content = summary(programs)
    assert (content["status"], content["saved"], content["steps"]) == ("done", False, 4)
    assert "version 4 is not saved, and there is no snapshot: " in content["not_saved"]
    assert program.output.count("ps-server: NOT_SAVED: ") == 1
    assert f"saved           {NOT_SAVED}" in program.out


@pytest.mark.parametrize("last", ["done", "SIGTERM"])
def test_ps_server_exits_with_15_or_the_code_of_its_signal(programs: Programs, last: str) -> None:
    flags = (
        "--data-dir",
        "data",
        "--snapshot-every",
        "1h",
        "--port-file",
        "port",
        "--bind",
        "127.0.0.1:0",
    )
    server = programs.fork("ps-server", *flags, *(["--exit-when-done"] if last == "done" else []))
    server.wait_for("listening")
    address = f"127.0.0.1:{(programs.folder / 'port').read_text().strip()}"
    worker = programs.fork("ps-worker", "--ps", address, "train.py", "breaks")
    assert worker.wait() == 0, worker.output
    if last == "SIGTERM":
        server.send(signal.SIGTERM)

    assert server.wait() == {"done": 15, "SIGTERM": 143}[last], server.output
    assert ("ps-server: NOT_SAVED: " in server.output) is (last == "done")
    assert ("final_weights_not_saved" in server.output) is (last == "SIGTERM")


def test_ps_run_refuses_an_invalid_path_before_it_starts_anything(programs: Programs) -> None:
    program = programs.run("ps-run", "--save", "missing/model.safetensors", "train.py")

    assert program.wait() == 2
    assert "--save missing/model.safetensors` is not valid: the folder " in program.err
    assert program.out == ""
