"""The command lines and environments that ps-run gives its processes."""

import errno
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from pscommon.settings import options
from pscommon.settings.command import given
from psworker.run.cli import COMMAND, has_terminal
from psworker.supervision.plan import RunPlan
from psworker.supervision.script import Script
from tests.support.settings_coverage import run_setting

FOLDER = Path("/tmp/x")
BOUND = {"s0": "127.0.0.1:4000"}


def plan(
    *args: str, environ: dict[str, str] | None = None, cores: int = 8, module: bool = False
) -> RunPlan:
    with COMMAND.make_context("ps-run", [*args, "train.py"]) as ctx:
        script = Script("train.py", module, ("--lr", "1"))
        return RunPlan(
            script,
            ctx.params,
            frozenset(given(ctx)),
            cores,
            FOLDER,
            ["server"],
            ["worker"],
            ["spare"],
            environ=environ or {},
        )


def flags(line: list[str]) -> dict[str, str]:
    """Return the value of each flag before the script."""
    end = line.index("--") if "--" in line else len(line)
    return {line[i]: line[i + 1] for i in range(1, end) if line[i].startswith("--")}


def test_each_server_gets_its_shard_a_free_port_and_the_address_of_the_first() -> None:
    cluster = plan("--servers", "2", "--workers", "3")

    first, second = cluster.command("s0", {}), cluster.command("s1", BOUND)

    assert first[0] == "server"
    assert flags(first)["--shard"] == "0/2"
    assert flags(second)["--shard"] == "1/2"
    assert flags(first)["--bind"] == flags(second)["--bind"] == "127.0.0.1:0"
    assert "--join" not in first
    assert flags(second)["--join"] == "127.0.0.1:4000"
    assert flags(second)["--port-file"] == str(cluster.port_file("s1"))


def test_a_restarted_server_keeps_its_port() -> None:
    assert flags(plan().command("s0", BOUND))["--bind"] == "127.0.0.1:4000"


def test_min_workers_is_the_number_of_workers_unless_given() -> None:
    assert flags(plan("--workers", "3").command("s0", {}))["--min-workers"] == "3"
    assert (
        flags(plan("--workers", "3", "--min-workers", "2").command("s0", {}))["--min-workers"]
        == "2"
    )


SERVER_VALUES = {
    "tensorboard": "curves",
    "policy": "ssp",
    "staleness": "3",
    "max_staleness": "7",
    "min_workers": "1",
    "on_worker_loss": "wait:2.5",
    "scale_workers": "2..8",
    "backup_workers": "1",
    "global_batch": "64",
    "bad_gradients": "clip",
    "max_norm": "2.5",
    "quarantine_after": "3",
    "durability": "log",
    "log_fsync": "always",
    "lease": "2.5",
    "progress_timeout": "30.0",
    "job": "otter",
    "data_dir": "/data",
    "snapshot_every": "5steps",
    "snapshot_keep": "9",
    "resume": "17",
    "lanes": "grpc",
    "in_flight": "3000000",
    "optimizers": "json",
    "save": "/weights.safetensors",
    "tls_ca": "/ca.pem",
    "tls_cert": "/cert.pem",
    "tls_key": "/key.pem",
    "token_file": "/tokens",
}


@pytest.mark.parametrize(
    "option",
    [option for option in options.FORWARDED_TO_SERVERS if not option.is_flag],
    ids=lambda option: str(option.key),
)
def test_server_flags_are_forwarded_to_every_server(option: Any) -> None:
    value = SERVER_VALUES[option.key]
    cluster = plan("--servers", "2", option.flag, value)

    for name in ("s0", "s1"):
        assert flags(cluster.command(name, BOUND))[option.flag] == value


@run_setting("tls_ca", "tls_cert", "tls_key", "token_file", "insecure")
def test_files_and_permissions_are_passed_to_every_process() -> None:
    names = ("tls_ca", "tls_cert", "tls_key", "token_file")
    given = {f"--{name.replace('_', '-')}": SERVER_VALUES[name] for name in names}
    cluster = plan(*(word for pair in given.items() for word in pair), "--insecure")

    for name in ("s0", "w0"):
        line = cluster.command(name, BOUND)
        assert given.items() <= flags(line).items()
        assert line.count("--insecure") == 1
    assert "--insecure" not in plan().command("s0", {})


def test_a_flag_that_is_switched_off_is_not_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PS_INSECURE", "0")

    assert "--insecure" not in plan().command("s0", {})


def test_unset_settings_are_not_passed_to_the_servers() -> None:
    assert "--policy" not in plan().command("s0", {})


def test_every_server_flag_is_either_forwarded_or_set_by_ps_run() -> None:
    passed_on = {
        *options.FORWARDED_TO_SERVERS,
        options.THREADS,
        options.METRICS_BIND,
        *options.LOGGING,
    }
    decided_here = {*options.PLACEMENT, options.EXIT_WHEN_DONE, *options.STANDBY}

    assert set(options.SERVER) == passed_on | decided_here


def test_workers_get_one_address_their_rank_and_the_script() -> None:
    cluster = plan("--workers", "2", "--device", "cpu")

    line = cluster.command("w1", BOUND)

    assert line[0] == "worker"
    assert flags(line)["--ps"] == "127.0.0.1:4000"
    assert flags(line)["--device"] == "cpu"
    assert line[line.index("--") :] == ["--", "train.py", "--lr", "1"]
    again = cluster.environment("w1", attempt=2)
    assert (again["PS_WORKER_RANK"], again["PS_WORKER_COUNT"], again["PS_WORKER_ATTEMPT"]) == (
        "1",
        "2",
        "2",
    )


def test_a_module_is_marked_before_the_script() -> None:
    line = plan(module=True).command("w0", BOUND)

    assert line[-5:] == ["-m", "--", "train.py", "--lr", "1"]


@pytest.mark.parametrize(
    ("args", "environ", "server", "worker"),
    [
        (("--servers", "2", "--workers", "4"), {}, "4", "2"),
        (("--servers", "9", "--workers", "16"), {}, "1", "1"),
        (("--threads", "5"), {}, "5", "5"),
        (("--threads", "5"), {"OMP_NUM_THREADS": "3"}, "5", "5"),
        ((), {"OMP_NUM_THREADS": "3"}, None, None),
    ],
)
def test_cores_are_divided_between_processes(
    args: tuple[str, ...], environ: dict[str, str], server: str, worker: str
) -> None:
    cluster = plan(*args, environ=environ)

    assert flags(cluster.command("s0", {})).get("--threads") == server
    assert flags(cluster.command("w0", BOUND)).get("--threads") == worker
    assert cluster.environment("w0", 0)["OMP_NUM_THREADS"] == (worker or environ["OMP_NUM_THREADS"])


def test_metrics_ports_count_up_over_all_processes() -> None:
    cluster = plan("--servers", "2", "--workers", "2", "--metrics-bind", "127.0.0.1:9000")

    ports = [
        flags(cluster.command(name, BOUND))["--metrics-bind"] for name in ("s0", "s1", "w0", "w1")
    ]

    assert ports == [f"127.0.0.1:{port}" for port in (9000, 9001, 9002, 9003)]


def test_without_a_metrics_port_only_the_first_server_has_a_page() -> None:
    """On a free port of this machine; a restarted server keeps it."""
    cluster = plan("--servers", "2", "--workers", "1")

    assert flags(cluster.command("s0", {}))["--metrics-bind"] == "127.0.0.1:0"
    restarted = flags(cluster.command("s0", BOUND, "127.0.0.1:9464"))
    assert restarted["--metrics-bind"] == "127.0.0.1:9464"
    for name in ("s1", "w0"):
        assert "--metrics-bind" not in cluster.command(name, BOUND, "127.0.0.1:9464")


def test_metrics_port_0_is_passed_to_every_process() -> None:
    assert (
        flags(plan("--metrics-bind", "127.0.0.1:0").command("w0", BOUND))["--metrics-bind"]
        == "127.0.0.1:0"
    )


def test_settings_of_the_environment_are_passed_as_flags_only() -> None:
    """Other PS_ variables, which the script may define, are passed to workers."""
    environ = {
        "PS_POLICY": "async",
        "PS_CONFIG": "x.toml",
        "PS_SERVERS": "2",
        "PATH": "/bin",
        "PS_MINE": "1",
    }
    cluster = plan(environ=environ)

    server = cluster.environment("s0", 0)
    assert server.pop("PS_NOT_SAVED_FILE") == str(cluster.not_saved_file)
    assert server == {"PATH": "/bin", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "8"}
    worker = cluster.environment("w0", 0)
    assert worker["PS_MINE"] == "1"
    assert not {"PS_POLICY", "PS_CONFIG", "PS_SERVERS"} & worker.keys()


@pytest.mark.parametrize(
    ("wanted", "passed"), [("auto", "text"), ("text", "text"), ("json", "json")]
)
def test_child_processes_log_text_unless_json_is_requested(wanted: str, passed: str) -> None:
    cluster = plan("--log-format", wanted, "--log-level", "debug")

    assert flags(cluster.command("s0", {}))["--log-format"] == passed
    assert flags(cluster.command("w0", BOUND))["--log-level"] == "debug"


def test_forwarded_values_parse_to_the_same_values() -> None:
    cluster = plan(
        "--lease", "250ms", "--data-dir", "/data", "--snapshot-every", "10m", "--resume", "never"
    )

    with options.command("server", "ps-server").make_context(
        "ps-server", cluster.command("s0", {})[1:]
    ) as ctx:
        settings: dict[str, Any] = ctx.params
    assert isinstance(ctx, click.Context)

    assert settings["lease"] == 0.25
    assert str(settings["snapshot_every"]) == "600s"
    assert settings["resume"] == "never"


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("terminal", [False, True])
def test_only_a_single_worker_reads_the_terminal(workers: int, terminal: bool) -> None:
    cluster = replace(plan("--workers", str(workers)), has_terminal=terminal)

    assert cluster.is_interactive("w0") is (terminal and workers == 1)
    assert not cluster.is_interactive("s0")


@pytest.mark.parametrize(
    ("is_terminal", "foreground", "expected"),
    [(True, "own", True), (True, "other", False), (True, "none", False), (False, "own", False)],
)
def test_a_run_in_the_background_leaves_the_terminal_to_the_shell(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, foreground: str, expected: bool
) -> None:
    def group(descriptor: int) -> int:
        if foreground == "none":
            raise OSError(errno.ENOTTY, "not the controlling terminal")
        return os.getpgrp() + (foreground == "other")

    stream = SimpleNamespace(isatty=lambda: is_terminal, fileno=lambda: 0)
    monkeypatch.setattr("psworker.run.cli.sys", SimpleNamespace(stdin=stream, stdout=stream))
    monkeypatch.setattr("psworker.run.cli.os.tcgetpgrp", group)

    assert has_terminal() is expected
