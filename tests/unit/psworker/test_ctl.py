"""ps-ctl against servers: output, requests and errors."""

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pscommon.core.errors import SnapshotError
from pscommon.core.partition import PartitionPlan
from psworker.ctl.cli import main
from tests.support.ctl_servers import MODEL, STATUS, Cluster, serving


@pytest.fixture(autouse=True)
def _no_external_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PS_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with serving(Cluster()) as cluster:
        yield cluster


Output = pytest.CaptureFixture[str]


def lines_of(capsys: Output) -> list[list[str]]:
    """Return the words of each printed line."""
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_status_shows_job_servers_workers_data_and_metrics(
    cluster: Cluster, capsys: Output
) -> None:
    assert main(["--ps", cluster.address, "status"]) == 0
    text = capsys.readouterr().out

    for part in (
        "job-7",
        "running",
        "ssp, at most 3 steps apart",
        "worker 2 (host-b, pid 17)",
        "3 m 20 s",
        "2 tensors, 1201 parameters, 4.81 kB, adam",
        "240 applied, 1 stale",
        "1, the newest 1 m 1 s old",
        "10.0.0.1:50051",
        "12.3 MB",
        "host-a:16",
        "cuda:0",
        "lease ended",
        "1 of 3",
        "40 of 94",
        "0.97",
    ):
        assert part in text


def test_plain_tables_have_one_line_per_row_and_no_control_characters(
    cluster: Cluster, capsys: Output
) -> None:
    main(["--ps", cluster.address, "status"])
    text = capsys.readouterr().out

    assert "accuracy?[31m" in text
    assert all(letter.isprintable() for letter in text.replace("\n", ""))


def test_status_as_json_is_the_answer_of_the_servers(cluster: Cluster, capsys: Output) -> None:
    assert main(["--ps", cluster.address, "status", "--output", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == STATUS


def test_a_metric_that_is_not_finite_is_null_in_json(cluster: Cluster, capsys: Output) -> None:
    for loss in (None, float("nan")):  # current servers send None, earlier releases sent NaN
        cluster.status = {**STATUS, "metrics": {"loss": loss}}

        assert main(["--ps", cluster.address, "status", "--output", "json"]) == 0
        assert '"loss": null' in capsys.readouterr().out
    cluster.status["metrics"] = {"loss": None}
    assert main(["--ps", cluster.address, "status"]) == 0
    assert ["loss", "not", "finite"] in lines_of(capsys)


@pytest.mark.parametrize(
    "sparse",
    [{"job": "j", "state": "waiting for a model"}, {**STATUS, "model": None, "seconds": 0}],
)
def test_status_of_a_job_before_registration(
    cluster: Cluster, capsys: Output, sparse: dict[str, object]
) -> None:
    cluster.status = sparse

    assert main(["--ps", cluster.address, "status"]) == 0
    assert str(sparse["state"]) in capsys.readouterr().out


def test_workers_shows_one_row_per_worker_without_empty_columns(
    cluster: Cluster, capsys: Output
) -> None:
    cluster.status["workers"] = [{**worker, "reason": ""} for worker in STATUS["workers"]]
    assert main(["workers", "--ps", cluster.address]) == 0
    title, headings, first, second = lines_of(capsys)

    assert title == ["Workers"]
    assert headings == [
        "worker",
        "rank",
        "host:pid",
        "device",
        "state",
        "health",
        "clock",
        "steps",
        "step",
        "own",
        "part",
        "samples/s",
        "phase",
        "phases",
        "staleness",
        "silent",
    ]
    assert " ".join(first[-7:-3]) == "compute 70%, wait 18%"
    assert (first[:6], second[:6]) == (
        ["1", "0", "host-a:16", "cuda:0", "active", "slow"],
        ["2", "1", "host-b:17", "cpu", "lost", "lost"],
    )


def test_plan_shows_the_bytes_of_each_shard(cluster: Cluster, capsys: Output) -> None:
    assert main(["--ps", cluster.address, "--output", "json", "plan"]) == 0
    document = json.loads(capsys.readouterr().out)
    plan = PartitionPlan(MODEL, 2)

    assert document["plan_digest"] == plan.digest
    assert [shard["address"] for shard in document["shards"]] == [
        "10.0.0.0:50051",
        "10.0.0.1:50051",
    ]
    assert [shard["bytes"] for shard in document["shards"]] == [
        plan.shard_nbytes(0),
        plan.shard_nbytes(1),
    ]
    assert document["shards"][1]["ranges"]["trainable"] == list(plan.range(1, "trainable"))
    assert [tensor["shards"] for tensor in document["tensors"]] == [[0, 1], [1]]
    assert main(["--ps", cluster.address, "plan"]) == 0
    assert "net.weight  float32[300, 4]  trainable  4.8 kB  0, 1" in capsys.readouterr().out


def test_plan_before_registration_reports_what_the_job_waits_for(
    cluster: Cluster, capsys: Output
) -> None:
    cluster.model = None

    assert main(["--ps", cluster.address, "plan"]) == 20
    assert (
        "NOT_READY: the model is not registered yet: the job waits for the first worker"
        in capsys.readouterr().err
    )


def test_save_takes_a_snapshot_and_prints_its_path(cluster: Cluster, capsys: Output) -> None:
    assert (
        main(["--ps", cluster.address, "snapshot", "save", "--wait", "1m", "--output", "json"]) == 0
    )
    assert json.loads(capsys.readouterr().out) == {
        "version": 121,
        "path": "/data/snapshots/000000000121",
    }
    assert cluster.waits == [60_000]


def test_list_without_a_directory_asks_the_servers(cluster: Cluster, capsys: Output) -> None:
    assert main(["snapshot", "list", "--ps", cluster.address]) == 0
    assert lines_of(capsys)[1] == [
        "100",
        "7.3",
        "kB",
        "1",
        "m",
        "1",
        "s",
        "complete",
        "/data/snapshots/000000000100",
    ]


def test_stop_ends_the_job_with_a_reason(cluster: Cluster, capsys: Output) -> None:
    assert main(["--ps", cluster.address, "stop", "--reason", "good enough"]) == 0
    assert cluster.stopped == ["good enough"]
    assert "stopping" in capsys.readouterr().out


def test_an_error_of_the_servers_is_one_line_and_its_exit_code(
    cluster: Cluster, capsys: Output
) -> None:
    cluster.error = SnapshotError("these servers have no --data-dir")

    assert main(["--ps", cluster.address, "snapshot", "save"]) == 12
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "NO_SNAPSHOT: these servers have no --data-dir" in captured.err


def test_an_unknown_variable_is_reported_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.setenv("PS_OUTPT", "json")

    assert main(["explain", "12"]) == 0
    out, err = capsys.readouterr()
    assert err == "ps-ctl: no setting is called PS_OUTPT; did you mean PS_OUTPUT?\n"
    assert "PS_" not in out


def test_the_environment_sets_output_and_timeout(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.setenv("PS_OUTPUT", "json")
    assert main(["--ps", cluster.address, "status"]) == 0
    assert json.loads(capsys.readouterr().out)["job"] == "job-7"
    assert main(["--ps", cluster.address, "status", "--output", "table"]) == 0
    assert capsys.readouterr().out.startswith("job")
    monkeypatch.setenv("PS_TIMEOUT", "200ms")
    cluster.hang.clear()
    assert main(["--ps", cluster.address, "status"]) == 20


@pytest.mark.parametrize(
    "args",
    [
        ["stat"],
        ["--ps", "nonsense", "status"],
        ["status", "--output", "xml"],
        ["snapshot"],
        [],
        ["status", "more"],
    ],
)
def test_usage_errors_exit_with_2_and_a_message(args: list[str], capsys: Output) -> None:
    assert main(args) == 2
    assert "Usage: ps-ctl" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        "",
        "status",
        "workers",
        "plan",
        "config",
        "stop",
        "doctor",
        "explain",
        "snapshot",
        "snapshot save",
        "snapshot list",
        "snapshot verify",
        "snapshot export",
        "snapshot restore",
        "drain",
        "policy",
        "policy set",
        "promote",
        "reshard",
    ],
)
def test_help_shows_examples(command: str, capsys: Output) -> None:
    assert main([*command.split(), "--help"]) == 0
    assert (
        f"ps-ctl {'--ps' if not command else ''}" in capsys.readouterr().out.partition("Example")[2]
    )


@pytest.mark.parametrize(
    ("command", "named"), [("drain", "WORKER"), ("snapshot restore", "VERSION")]
)
def test_a_missing_argument_has_the_name_of_the_help(
    command: str, named: str, capsys: Output
) -> None:
    assert main(command.split()) == 2
    assert f"[OPTIONS] {named}\n" in (output := capsys.readouterr().err)
    assert f"Missing argument '{named}'" in output


def test_config_shows_each_value_and_its_source(
    monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str], capsys: Output
) -> None:
    file = os.path.join(tmp_path, "cluster.toml")
    with open(file, "w") as text:
        text.write('lease = "7s"\n[server]\nsnapshot-keep = 9\n[worker]\ndevice = "cpu"\n')
    monkeypatch.setenv("PS_MIN_WORKERS", "4")

    assert main(["config", "--config", file, "--shard", "1/2", "--output", "json"]) == 0
    merged = {
        row["key"]: (row["value"], row["source"]) for row in json.loads(capsys.readouterr().out)
    }
    assert merged["shard"] == ("1/2", "flag")
    assert merged["min_workers"] == (4, "environment")
    assert merged["lease"] == (7.0, "file")
    assert merged["snapshot_keep"] == (9, "file")
    assert merged["policy"] == ("sync", "default")
    assert merged["data_dir"] == (None, "default")
    assert "device" not in merged


def test_config_of_another_command_as_a_table(capsys: Output) -> None:
    assert main(["config", "--for", "worker", "--device", "cpu"]) == 0
    lines = lines_of(capsys)

    assert lines[0] == ["key", "value", "from"]
    assert ["device", "cpu", "flag"] in lines
    assert ["job", "(unset)", "default"] in lines


def test_the_help_of_config_names_the_flags_of_the_command(capsys: Output) -> None:
    assert main(["config", "--help"]) == 0
    assert "ps-ctl config [OPTIONS] [FLAGS OF THAT COMMAND]..." in capsys.readouterr().out


def test_config_refuses_unknown_settings(tmp_path: os.PathLike[str], capsys: Output) -> None:
    file = os.path.join(tmp_path, "cluster.toml")
    with open(file, "w") as text:
        text.write("polcy = 'sync'\n")

    assert main(["config", "--config", file]) == 2
    assert "did you mean 'policy'" in capsys.readouterr().err
    assert main(["config", "--polcy", "sync"]) == 2


def run_on_a_terminal(args: list[str], columns: int) -> list[str]:
    """Return the lines that a terminal shows, without colours."""
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "psworker.ctl.cli", *args]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns)}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal, env=environment
    ) as shown:
        os.close(terminal)
        text = b"".join(iter(lambda: _read(controller), b""))
        assert shown.wait(60) == 0
    os.close(controller)
    return re.sub(r"\x1b\[[0-9;]*m", "", text.decode()).splitlines()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except OSError:  # the other end is closed
        return b""


def test_status_fits_a_terminal_of_80_columns(cluster: Cluster) -> None:
    cluster.status = {**STATUS, "metrics": {"loss [bold]": 0.5}}
    lines = run_on_a_terminal(["--ps", cluster.address, "status"], 80)

    assert any("───" in line for line in lines)
    assert max(map(len, lines)) <= 80
    assert any("loss [bold]" in line for line in lines)
    assert [line.split()[:3] for line in lines if "host-a:16" in line] == [
        ["1", "host-a:16", "cuda:0"]
    ]


def test_a_narrow_terminal_does_not_wrap_rows(cluster: Cluster) -> None:
    lines = run_on_a_terminal(["--ps", cluster.address, "workers"], 60)

    assert [line.split()[-2:] for line in lines if "host-b:17" in line] == [["lease", "ended"]]


def test_a_closed_pipe_is_no_error() -> None:
    command = (
        f"{sys.executable} -m psworker.ctl.cli config --output json | true; echo ${{PIPESTATUS[0]}}"
    )
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True
    )

    assert (done.stdout, done.stderr) == ("0\n", "")
