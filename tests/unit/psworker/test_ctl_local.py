"""ps-ctl without an address, the confirmation of `stop`, and the settings of a job."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pscommon.system.local_jobs import JobAnnouncement
from psworker.client.client import Client
from psworker.ctl.cli import main
from tests.support.ctl_servers import STATUS, Cluster, serving

Output = pytest.CaptureFixture[str]

SETTINGS = [
    {"key": "job", "value": "job-7", "source": "shard 0"},
    {"key": "policy", "value": "ssp", "source": "policy set"},
    {"key": "max_norm", "value": None, "source": "shard 0"},
]


@pytest.fixture(autouse=True)
def _private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide external settings and jobs."""
    for name in [name for name in os.environ if name.startswith("PS_")]:
        monkeypatch.delenv(name)
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with serving(Cluster()) as cluster:
        yield cluster


def test_the_only_local_job_needs_no_address(cluster: Cluster, capsys: Output) -> None:
    JobAnnouncement("job-7", cluster.address)

    assert main(["status", "--output", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["job"] == "job-7"
    assert main(["drain", "3"]) == 0
    assert cluster.drained == [3]


def test_several_local_jobs_are_listed(cluster: Cluster, capsys: Output) -> None:
    JobAnnouncement("job-7", cluster.address)
    JobAnnouncement("job-8", "127.0.0.1:9")

    assert main(["stop"]) == 2
    output = capsys.readouterr().err
    assert "`--ps HOST:PORT` is missing; several jobs of this user run on this machine" in output
    assert f"job job-7 at {cluster.address} (pid {os.getpid()})" in output
    assert "job job-8 at 127.0.0.1:9" in output
    assert cluster.stopped == []


def test_a_client_without_an_address_finds_the_only_local_job(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    cluster.shards = 1
    JobAnnouncement("job-7", cluster.address)
    with Client(observe=True) as client:
        assert client.status()["job"] == "job-7"

    JobAnnouncement("job-8", "127.0.0.1:9")
    monkeypatch.setenv("PS_JOB", "job-7")
    with Client(observe=True) as client:
        assert client.status()["job"] == "job-7"


@pytest.mark.parametrize(
    ("word", "suggested"), [("stpo", False), ("stp", False), ("sop", False), ("stauts", True)]
)
def test_stop_is_never_suggested(word: str, suggested: bool, capsys: Output) -> None:
    assert main([word]) == 2
    output = capsys.readouterr().err
    assert f"No such command '{word}'" in output
    assert "stop" not in output
    assert ("'status'" in output) is suggested


def stop_on_a_terminal(cluster: Cluster, answer: bytes, *args: str) -> tuple[int, str]:
    """Type this answer to `ps-ctl stop`; return its exit code and what the terminal shows."""
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "psworker.ctl.cli", "--ps", cluster.address, "stop", *args]
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        os.write(controller, answer)
        seen = b"".join(iter(lambda: _read(controller), b""))
        code = process.wait(60)
    os.close(controller)
    return code, seen.decode()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except OSError:  # the other end is closed
        return b""


def test_stop_asks_for_confirmation_on_a_terminal(cluster: Cluster) -> None:
    code, seen = stop_on_a_terminal(cluster, b"n\n")
    assert code == 130
    assert "End job job-7 (version 120, 1 worker)? [y/N]" in seen
    assert "the job was not stopped" in seen
    assert cluster.stopped == []

    code, seen = stop_on_a_terminal(cluster, b"y\n")
    assert code == 0
    assert cluster.stopped == ["ps-ctl stop"]


def test_stop_with_yes_does_not_ask(cluster: Cluster) -> None:
    code, seen = stop_on_a_terminal(cluster, b"", "--yes")

    assert code == 0
    assert "?" not in seen
    assert cluster.stopped == ["ps-ctl stop"]


def test_stop_without_a_terminal_does_not_ask(cluster: Cluster, capsys: Output) -> None:
    assert main(["--ps", cluster.address, "stop"]) == 0
    assert cluster.stopped == ["ps-ctl stop"]


def test_config_shows_the_settings_of_the_job(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.setenv("PS_POLICY", "async")  # a setting of this machine
    cluster.status = {**STATUS, "settings": SETTINGS}

    assert main(["--ps", cluster.address, "config", "--output", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == SETTINGS
    assert main(["--ps", cluster.address, "config"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["policy", "ssp", "policy", "set"] in lines
    assert ["max_norm", "(unset)", "shard", "0"] in lines


def test_config_without_ps_shows_the_settings_of_this_machine(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.setenv("PS_SERVERS", cluster.address)

    assert main(["config", "--policy", "async", "--output", "json"]) == 0
    rows = {row["key"]: row["source"] for row in json.loads(capsys.readouterr().out)}
    assert rows["policy"] == "flag"


@pytest.mark.parametrize(
    ("args", "output"),
    [
        (["--ps", "127.0.0.1:1", "config", "--policy", "async"], "`--ps` excludes `--policy`"),
        (["config", "--ps", "127.0.0.1:1"], "`--ps` after the command"),
        (["config", "--ps=127.0.0.1:1"], "`--ps` after the command"),
    ],
)
def test_config_of_a_job_excludes_flags_of_a_command(
    args: list[str], output: str, capsys: Output
) -> None:
    assert main(args) == 2
    assert output in capsys.readouterr().err


def test_config_of_an_older_server_is_refused(cluster: Cluster, capsys: Output) -> None:
    assert main(["--ps", cluster.address, "config"]) == 2
    assert "older release" in capsys.readouterr().err
