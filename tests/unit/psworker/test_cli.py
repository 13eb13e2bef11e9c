"""The command line of ps-worker: which settings and arguments the script receives."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pscommon.settings import options
from psworker import cli
from psworker.supervision.script import Script
from tests.support.events import events

LIMIT = 60.0


@pytest.fixture(autouse=True)
def no_external_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for option in options.WORKER:
        for variable in option.variables:
            monkeypatch.delenv(variable, raising=False)
    monkeypatch.delenv("PS_LOCAL", raising=False)


def parse(*args: str) -> dict[str, Any]:
    with cli.COMMAND.make_context("ps-worker", list(args)) as ctx:
        return dict(ctx.params)


@pytest.mark.parametrize(
    ("line", "script", "module", "rest"),
    [
        (["train.py"], "train.py", False, ()),
        (
            ["train.py", "--device", "tpu", "-m", "x"],
            "train.py",
            False,
            ("--device", "tpu", "-m", "x"),
        ),
        (["train.py", "--", "a", "--", "b"], "train.py", False, ("--", "a", "--", "b")),
        (["--", "train.py", "--help"], "train.py", False, ("--help",)),
        (["--", "-odd.py", "x"], "-odd.py", False, ("x",)),
        (["-m", "pack.train", "--lr", "1"], "pack.train", True, ("--lr", "1")),
        (["-m", "pack.train", "-m", "--version"], "pack.train", True, ("-m", "--version")),
        (["-m", "--", "pack.train"], "pack.train", True, ()),
        (["train.py", "", "a b"], "train.py", False, ("", "a b")),
    ],
)
def test_arguments_after_the_script_belong_to_the_script(
    line: list[str], script: str, module: bool, rest: tuple[str, ...]
) -> None:
    found = parse("--ps", "a:1", "--device", "cpu", *line)

    assert (found["script"], found["module"], found["args"]) == (script, module, rest)
    assert found["device"] == "cpu"


def test_known_settings_are_exported_to_the_script() -> None:
    environ = {"PS_WORKER_RANK": "7", "PS_JOB": "before", "OTHER": "x"}

    cli.export(parse("--ps", "a:1,b:2", "--device", "cpu", "train.py"), environ)

    assert environ == {
        "PS_SERVERS": "a:1,b:2",
        "PS_DEVICE": "cpu",
        "PS_WORKER_RANK": "7",
        "PS_JOB": "before",
        "PS_CONNECT_TIMEOUT": "60.0",
        "PS_LANES": "auto",
        "PS_OVERLAP": "off",
        "OTHER": "x",
    }


def test_job_and_rank_are_exported_if_given() -> None:
    environ: dict[str, str] = {}

    line = (
        "--ps",
        "a:1",
        "--job",
        "otter",
        "--worker-rank",
        "3",
        "--worker-count",
        "4",
        "--device",
        "cpu",
        "x.py",
    )
    cli.export(parse(*line), environ)

    assert (environ["PS_JOB"], environ["PS_WORKER_RANK"], environ["PS_WORKER_COUNT"]) == (
        "otter",
        "3",
        "4",
    )


def test_the_rank_from_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PS_WORKER_RANK", "5")

    assert parse("--ps", "a:1", "x.py")["worker_rank"] == 5


@pytest.fixture
def started_scripts(monkeypatch: pytest.MonkeyPatch) -> list[Script]:
    """Replace the execution of scripts: collect the scripts that would run."""
    scripts: list[Script] = []
    monkeypatch.setattr("psworker.cli.run", lambda script, debug: scripts.append(script) or 0)
    monkeypatch.setattr("pscommon.telemetry.logs.set_up_worker", lambda *_, **__: None)
    monkeypatch.setattr("os.environ", dict(os.environ))
    return scripts


def test_missing_servers_are_a_usage_error(
    started_scripts: list[Script], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train.py"]) == 2

    assert "`--ps HOST:PORT` is missing" in capsys.readouterr().err
    assert started_scripts == []


def test_log_lines_have_the_rank_and_no_worker_number(
    started_scripts: list[Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers assign worker numbers later."""
    fields: dict[str, object] = {}
    monkeypatch.setattr(
        "pscommon.telemetry.logs.set_up_worker", lambda *_, **passed: fields.update(passed)
    )

    assert cli.main(["--ps", "a:1", "--worker-rank", "3", "train.py"]) == 0
    assert fields == {"rank": 3, "job": None}


@pytest.mark.parametrize("attempt", [None, "0"])
def test_an_unknown_variable_is_reported_once_and_not_under_ps_run(
    attempt: str | None,
    started_scripts: list[Script],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("PS_DEVISE", "cpu")
    if attempt is not None:
        monkeypatch.setenv("PS_WORKER_ATTEMPT", attempt)

    cli.main(["--ps", "a:1", "train.py"])

    assert ("environment_variable_unknown" in events(caplog)) is (attempt is None)


def test_ps_local_needs_no_servers(started_scripts: list[Script]) -> None:
    os.environ["PS_LOCAL"] = "1"

    assert cli.main(["-m", "train", "--lr", "1"]) == 0
    assert started_scripts == [Script("train", True, ("--lr", "1"))]


@pytest.mark.parametrize(
    ("line", "script"),
    [
        (["-mpack.train", "-mx"], Script("pack.train", True, ("-mx",))),
        (["--job", "-mine", "-mpack"], Script("pack", True)),
        (["--threads=1", "-mpack", "--lr", "1"], Script("pack", True, ("--lr", "1"))),
        (["-m", "-mpack"], None),
        (["train.py", "-mpack"], Script("train.py", False, ("-mpack",))),
        (["--", "-mine.py"], Script("-mine.py")),
    ],
)
def test_the_module_option_is_parsed_as_by_python(
    started_scripts: list[Script], line: list[str], script: Script | None
) -> None:
    assert cli.main(["--ps", "a:1", "--device", "cpu", *line]) == (0 if script else 2)

    assert started_scripts == ([script] if script else [])


def test_ps_local_excludes_servers(
    started_scripts: list[Script], capsys: pytest.CaptureFixture[str]
) -> None:
    os.environ["PS_LOCAL"] = "1"

    assert cli.main(["--ps", "a:1", "train.py"]) == 2

    assert "PS_LOCAL excludes" in capsys.readouterr().err
    assert started_scripts == []


def test_a_missing_gpu_is_a_usage_error(
    started_scripts: list[Script], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["--ps", "a:1", "--device", "cuda:99", "train.py"]) == 2

    assert "cuda:99" in capsys.readouterr().err
    assert started_scripts == []


def test_threads_sets_the_threads_of_torch(started_scripts: list[Script]) -> None:
    import torch

    before = torch.get_num_threads()
    try:
        assert cli.main(["--ps", "a:1", "--threads", "1", "train.py"]) == 0
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_metrics_that_other_machines_reach_need_tls_or_insecure(
    started_scripts: list[Script],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where plain text is permitted, the start warns."""
    monkeypatch.setattr("psworker.session.metrics.serve", lambda bind: None)
    line = ["--ps", "a:1", "--metrics-bind", "0.0.0.0:0", "train.py"]

    assert cli.main(line) == 2
    assert "--metrics-bind 0.0.0.0:0 is open to other machines" in capsys.readouterr().err
    assert started_scripts == []

    assert cli.main(["--insecure", *line]) == 0
    assert events(caplog) == ["plain_text_permitted"]


def test_metrics_are_served_at_the_given_address(
    started_scripts: list[Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    binds: list[str] = []
    monkeypatch.setattr("psworker.session.metrics.serve", binds.append)

    assert cli.main(["--ps", "a:1", "--metrics-bind", "127.0.0.1:0", "train.py"]) == 0
    assert binds == ["127.0.0.1:0"]


@pytest.mark.parametrize("args", [[], ["--ps", "a", "x.py"], ["--devise", "cpu", "x.py"], ["-m"]])
def test_usage_errors_exit_with_2(args: list[str], started_scripts: list[Script]) -> None:
    assert cli.main(args) == 2
    assert started_scripts == []


def test_modules_beside_the_script_do_not_shadow_those_of_the_worker(tmp_path: Path) -> None:
    """Files beside the script have the names of modules that the worker imports. The script
    still imports its own file.
    """
    (tmp_path / "queue.py").write_text("raise RuntimeError('ours was shadowed')")
    (tmp_path / "grpc.py").write_text("raise RuntimeError('ours was shadowed')")
    (tmp_path / "common.py").write_text("WORD = 'neighbour'")
    (tmp_path / "train.py").write_text(
        "import os, sys, logging, torch, common\n"
        "logging.getLogger('psworker.mine').info('hello')\n"
        "print(__name__, sys.argv[1:], common.WORD, os.environ['PS_DEVICE'], "
        "torch.get_num_threads())\n"
        "sys.exit(5)\n"
    )
    line = ["-m", "psworker", "--threads", "1", "--device", "cpu", "train.py", "--ps", "x"]

    result = subprocess.run(
        [sys.executable, "-P", *line],
        cwd=tmp_path,
        env={**os.environ, "PS_LOCAL": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )

    assert result.returncode == 5, result.stderr
    assert result.stdout == "__main__ ['--ps', 'x'] neighbour cpu 1\n"
    assert '"event": "hello"' in result.stderr
