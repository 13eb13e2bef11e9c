"""The command line of ps-server and the settings that it yields."""

import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from pscommon.core.errors import InvalidRequestError, TakenError
from pscommon.security.settings import TLS_KEYS, SecuritySettings
from pscommon.settings import options
from pscommon.settings.values import SnapshotEvery
from pscommon.system import event_files
from psserver import cli
from psserver.process.config import ServerConfig
from tests.support.events import events

LIMIT = 60.0


@pytest.fixture(autouse=True)
def no_external_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for option in options.SERVER:
        monkeypatch.delenv(option.variables[0], raising=False)


@pytest.fixture
def started_configurations(monkeypatch: pytest.MonkeyPatch) -> list[ServerConfig]:
    """Replace the server: collect the configurations that it would run with, and exit with 0."""
    configs: list[ServerConfig] = []
    app: Any = types.ModuleType("psserver.app")
    app.run = lambda config: configs.append(config) or 0
    monkeypatch.setitem(sys.modules, "psserver.app", app)
    monkeypatch.setattr("psserver.app", app, raising=False)
    monkeypatch.setattr("pscommon.telemetry.logs.set_up", lambda *_, **__: None)
    return configs


def test_defaults(started_configurations: list[ServerConfig]) -> None:
    assert cli.main([]) == 0

    (config,) = started_configurations
    assert config == ServerConfig()
    assert (config.shard, config.shards, config.bind, config.policy) == (
        0,
        1,
        "127.0.0.1:50051",
        "sync",
    )
    assert (config.join, config.data_dir, config.snapshot_every, config.resume) == (
        None,
        None,
        None,
        "auto",
    )


def test_every_flag_sets_its_field(started_configurations: list[ServerConfig]) -> None:
    line = (
        "--shard 1/3 --bind 0.0.0.0:7 --insecure --advertise me:7 --join first:9 --join-timeout 11 "
        "--policy ssp --staleness 2 --max-staleness 5 --min-workers 4 --lease 2s --job otter "
        "--exit-when-done --data-dir data --snapshot-every 500steps --snapshot-keep 6 --resume 12 "
        "--metrics-bind 127.0.0.1:0 --port-file port --threads 3 --log-level debug --log-format "
        "json"
    )

    assert cli.main(line.split()) == 0

    assert started_configurations == [
        ServerConfig(
            shard=1,
            shards=3,
            bind="0.0.0.0:7",
            advertise="me:7",
            join="first:9",
            join_timeout=11.0,
            policy="ssp",
            staleness=2,
            max_staleness=5,
            min_workers=4,
            lease=2.0,
            job="otter",
            exit_when_done=True,
            data_dir=Path("data"),
            snapshot_every=SnapshotEvery(steps=500),
            snapshot_keep=6,
            resume=12,
            metrics_bind="127.0.0.1:0",
            port_file=Path("port"),
            threads=3,
            log_level="debug",
            log_format="json",
            security=SecuritySettings(insecure=True),
        )
    ]


def test_every_field_has_an_option_and_every_option_a_field() -> None:
    fields = set(ServerConfig.__dataclass_fields__) - {"shards", "security"}
    protection = {option.key for option in options.PROTECTION}

    assert fields == {option.key for option in options.SERVER} - protection
    assert protection == {*TLS_KEYS, *SecuritySettings.__dataclass_fields__} - {"tls"}


def test_defaults_that_depend_on_other_settings() -> None:
    assert ServerConfig(shard=2, shards=3, join="first:1").bind == "127.0.0.1:50053"
    assert ServerConfig(data_dir=Path("d")).snapshot_every == SnapshotEvery(seconds=60.0)
    assert ServerConfig(join="me:1").join is None


def test_a_shard_may_start_without_the_address_of_shard_0() -> None:
    """Workers that list every server introduce them to each other."""
    assert ServerConfig(shard=1, shards=2).join is None


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "shard out of range": ({"shard": 2, "shards": 2}, "--shard 2/2"),
    "negative shard": ({"shard": -1}, "--shard -1/1"),
    "a shard that has no port": ({"shard": 20000, "shards": 30000}, "--bind HOST:PORT"),
    "ssp without a bound": ({"policy": "ssp"}, "policy ssp needs a bound"),
    "sync with a bound": ({"policy": "sync", "staleness": 1}, "sync excludes `--staleness 1`"),
    "async with a bound": ({"policy": "async", "staleness": 0}, "async excludes `--staleness 0`"),
    "negative bound": ({"policy": "ssp", "staleness": -1}, "--staleness -1"),
    "negative age": ({"max_staleness": -1}, "--max-staleness -1"),
    "no workers": ({"min_workers": 0}, "--min-workers 0"),
    "no lease": ({"lease": 0.0}, "--lease 0.0"),
    "no time to join": ({"join_timeout": -1.0}, "--join-timeout -1.0"),
    "keeping nothing": ({"snapshot_keep": 0}, "--snapshot-keep 0"),
    "no threads": ({"threads": 0}, "--threads 0"),
    "listening everywhere without an address": ({"bind": "0.0.0.0:1"}, "--advertise"),
    "and in IPv6": ({"bind": "[::]:1"}, "--advertise"),
    "open to others": ({"bind": "10.0.0.1:1"}, "--bind 10.0.0.1:1 is open to other machines"),
    "open streams": ({"stream_bind": "0.0.0.0:1"}, "--stream-bind 0.0.0.0:1 is open"),
    "open metrics": ({"metrics_bind": "[::]:1"}, "--metrics-bind [::]:1 is open"),
    "snapshots into nowhere": ({"snapshot_every": SnapshotEvery(steps=1)}, "--data-dir"),
    "a version of nothing": ({"resume": 3}, "--resume 3"),
    "a log into nowhere": ({"durability": "log"}, "--data-dir"),
    "a port in no folder": ({"port_file": Path("/missing/port")}, "--port-file /missing/port"),
    "backup workers of no round": (
        {"policy": "async", "backup_workers": 1},
        "--backup-workers 1 excludes policy async",
    ),
    "samples of no round": (
        {"policy": "async", "global_batch": 8},
        "--global-batch 8 excludes policy async",
    ),
    "samples without some workers": (
        {"global_batch": 8, "backup_workers": 1},
        "--global-batch excludes --backup-workers",
    ),
}


@pytest.mark.parametrize(("settings", "text"), BAD.values(), ids=BAD.keys())
def test_incompatible_settings_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ServerConfig(**settings)

    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("--shard 2/2", "--shard"),
        ("--bind 0.0.0.0:1", "--advertise"),
        ("--policy ssp", "--staleness"),
        ("--snapshot-every 5", "--snapshot-every"),
        ("--polcy sync", "--policy"),
        ("surplus", "surplus"),
    ],
)
def test_wrong_usage_exits_with_2_and_starts_nothing(
    line: str,
    text: str,
    started_configurations: list[ServerConfig],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(line.split()) == 2

    assert text in capsys.readouterr().err
    assert started_configurations == []


def test_a_failed_start_is_reported_in_one_line(
    started_configurations: list[ServerConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(_: ServerConfig) -> int:
        raise TakenError("127.0.0.1:50051 is in use")

    monkeypatch.setattr("psserver.app.run", run)

    assert cli.main([]) == 10
    (line,) = capsys.readouterr().err.splitlines()
    assert "127.0.0.1:50051 is in use" in line


@pytest.mark.parametrize(("shard", "code"), [("0/2", 2), ("1/2", 0)])
def test_only_shard_0_needs_what_curves_need(
    shard: str,
    code: int,
    started_configurations: list[ServerConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(event_files, "find_spec", lambda name: None)

    assert cli.main(["--shard", shard, "--tensorboard", str(tmp_path)]) == code

    assert ("pip install 'paramserver[tensorboard]'" in capsys.readouterr().err) == (code == 2)
    assert len(started_configurations) == (code == 0)


def test_an_unknown_environment_variable_is_reported(
    started_configurations: list[ServerConfig],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("PS_MIN_WORKER", "3")

    assert cli.main([]) == 0
    assert "environment_variable_unknown" in events(caplog)


def test_the_exit_code_is_that_of_the_server(
    started_configurations: list[ServerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psserver.app.run", lambda _: 143)

    assert cli.main([]) == 143


def test_python_m_psserver_is_the_same_command_and_help_loads_no_torch() -> None:
    code = (
        "import runpy, sys; sys.argv = ['psserver', '--help']\n"
        "try: runpy.run_module('psserver', run_name='__main__')\n"
        "finally: print('torch' in sys.modules)"
    )

    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT, check=False
    )

    assert result.returncode == 0
    assert "ps-server --shard 0/2" in result.stdout
    assert result.stdout.splitlines()[-1] == "False"
