"""ps-worker's command line: what it tells the script, and what it leaves alone."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pscommon.settings import options
from psworker import cli
from psworker.launch.script import Script
from tests.support.events import events

LIMIT = 60.0


@pytest.fixture(autouse=True)
def no_settings_around_us(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_what_follows_the_script_is_the_scripts(
    line: list[str], script: str, module: bool, rest: tuple[str, ...]
) -> None:
    found = parse("--ps", "a:1", "--device", "cpu", *line)

    assert (found["script"], found["module"], found["args"]) == (script, module, rest)
    assert found["device"] == "cpu"


def test_the_script_gets_the_known_settings() -> None:
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


def test_the_rank_of_a_launcher_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PS_WORKER_RANK", "5")

    assert parse("--ps", "a:1", "x.py")["worker_rank"] == 5


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Script]:
    """Stands in for running the script, in this process: collects what would run."""
    scripts: list[Script] = []
    monkeypatch.setattr("psworker.cli.run", lambda script, debug: scripts.append(script) or 0)
    monkeypatch.setattr("pscommon.telemetry.logs.set_up", lambda *_, **__: None)
    monkeypatch.setattr("os.environ", dict(os.environ))
    return scripts


def test_no_servers_is_bad_usage(ran: list[Script], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train.py"]) == 2

    assert "`--ps HOST:PORT` is missing" in capsys.readouterr().err
    assert ran == []


def test_logs_tell_its_rank_and_not_a_worker_number(
    ran: list[Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those are given by the servers, and differ."""
    fields: dict[str, object] = {}
    monkeypatch.setattr(
        "pscommon.telemetry.logs.set_up", lambda *_, **passed: fields.update(passed)
    )

    assert cli.main(["--ps", "a:1", "--worker-rank", "3", "train.py"]) == 0
    assert fields == {"rank": 3, "job": None}


@pytest.mark.parametrize("attempt", [None, "0"])
def test_a_variable_that_nobody_reads_is_named_unless_ps_run_has_done_so(
    attempt: str | None,
    ran: list[Script],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("PS_DEVISE", "cpu")
    if attempt is not None:
        monkeypatch.setenv("PS_WORKER_ATTEMPT", attempt)

    cli.main(["--ps", "a:1", "train.py"])

    assert ("environment_variable_unknown" in events(caplog)) is (attempt is None)


def test_training_without_servers_needs_none(ran: list[Script]) -> None:
    os.environ["PS_LOCAL"] = "1"

    assert cli.main(["-m", "train", "--lr", "1"]) == 0
    assert ran == [Script("train", True, ("--lr", "1"))]


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
def test_a_module_may_be_named_as_python_takes_it(
    ran: list[Script], line: list[str], script: Script | None
) -> None:
    assert cli.main(["--ps", "a:1", "--device", "cpu", *line]) == (0 if script else 2)

    assert ran == ([script] if script else [])


def test_servers_and_training_without_them_exclude_each_other(
    ran: list[Script], capsys: pytest.CaptureFixture[str]
) -> None:
    os.environ["PS_LOCAL"] = "1"

    assert cli.main(["--ps", "a:1", "train.py"]) == 2

    assert "PS_LOCAL excludes" in capsys.readouterr().err
    assert ran == []


def test_a_gpu_that_is_not_there_is_bad_usage(
    ran: list[Script], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["--ps", "a:1", "--device", "cuda:99", "train.py"]) == 2

    assert "cuda:99" in capsys.readouterr().err
    assert ran == []


def test_threads_are_torchs(ran: list[Script]) -> None:
    import torch

    before = torch.get_num_threads()
    try:
        assert cli.main(["--ps", "a:1", "--threads", "1", "train.py"]) == 0
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_metrics_are_served_where_asked(ran: list[Script], monkeypatch: pytest.MonkeyPatch) -> None:
    binds: list[str] = []
    monkeypatch.setattr("psworker.session.metrics.serve", binds.append)

    assert cli.main(["--ps", "a:1", "--metrics-bind", "127.0.0.1:0", "train.py"]) == 0
    assert binds == ["127.0.0.1:0"]


@pytest.mark.parametrize("args", [[], ["--ps", "a", "x.py"], ["--devise", "cpu", "x.py"], ["-m"]])
def test_bad_usage_exits_with_2(args: list[str], ran: list[Script]) -> None:
    assert cli.main(args) == 2
    assert ran == []


def test_a_whole_worker_process(tmp_path: Path) -> None:
    """The script's neighbours are called like modules that we need: they must not get in our
    way, nor we in theirs.
    """
    (tmp_path / "queue.py").write_text("raise RuntimeError('ours was shadowed')")
    (tmp_path / "grpc.py").write_text("raise RuntimeError('ours was shadowed')")
    (tmp_path / "common.py").write_text("WORD = 'neighbour'")
    (tmp_path / "train.py").write_text(
        "import os, sys, logging, torch, common\n"
        "logging.getLogger('mine').info('hello')\n"
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
