"""Summary, table and error box of a run."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from psworker.run import summary as report
from psworker.run.job_poller import JobResult
from psworker.supervision.decisions import RunOutcome, describe, exit_status, is_retryable

SETTINGS: dict[str, Any] = {"policy": "ssp", "staleness": 3, "servers": 2, "workers": 4}
RESULT = JobResult(
    {
        "steps": 10,
        "samples": 320,
        "goodput": {"samples": 0.9, "seconds": None},
        "metrics": {"loss": 0.25, "accuracy": 0.987654321},
    },
    "f" * 64,
)


def test_the_summary_of_a_successful_run() -> None:
    assert report.summary(RunOutcome("done"), RESULT, SETTINGS, 1.23456, 2) == {
        "status": "done",
        "seconds": 1.235,
        "training": "",
        "trainings_finished": [],
        "steps": 10,
        "samples": 320,
        "goodput": {"samples": 0.9, "seconds": None},
        "this_run": {"steps": 10, "samples": 320, "resumed_version": None},
        "policy": "ssp",
        "staleness": 3,
        "servers": 2,
        "workers": 4,
        "restarts": 2,
        "weights_sha256": "f" * 64,
        "metrics": {"loss": 0.25, "accuracy": 0.987654321},
        "history": {},
        "saved": None,
    }


def test_the_summary_of_a_run_without_training() -> None:
    content = report.summary(
        RunOutcome("failed", 10, "s0", 10, "s0 exited"), JobResult({}), SETTINGS, 1.0, 0
    )

    assert (
        content["steps"],
        content["samples"],
        content["metrics"],
        content["weights_sha256"],
    ) == (0, 0, {}, None)
    assert content["error"] == {"process": "s0", "exit_code": 10, "reason": "s0 exited"}


def test_the_summary_of_a_resumed_run_has_the_totals_of_job_and_run() -> None:
    resumed = JobResult(RESULT.status, "f" * 64, resumed={"version": 3, "steps": 6, "samples": 300})
    content = report.summary(RunOutcome("done"), resumed, SETTINGS, 1.0, 0)

    assert (content["steps"], content["samples"]) == (10, 320)
    assert content["this_run"] == {"steps": 4, "samples": 20, "resumed_version": 3}
    assert "steps           10  (320 samples)\n  this run        4  (20 samples)" in report.table(
        content
    )


SAVING = {**SETTINGS, "data_dir": Path("data"), "save": None}


def test_with_a_data_directory_the_summary_reports_whether_the_end_is_saved() -> None:
    done = report.summary(RunOutcome("done"), RESULT, SAVING, 1.0, 0)
    assert done["saved"] is True
    assert "not_saved" not in done
    assert "saved" not in report.table(done)

    lost = report.summary(RunOutcome("done", 15), RESULT, SAVING, 1.0, 0, "the disk is full")
    assert (lost["status"], lost["saved"], lost["not_saved"]) == ("done", False, "the disk is full")
    assert report.table(lost).splitlines()[-1] == f"  saved           {report.NOT_SAVED}"
    assert report.table(lost, coloured=True).splitlines()[-1].startswith("\x1b[31m  saved ")

    interrupted = report.summary(RunOutcome("interrupted", 130), RESULT, SAVING, 1.0, 0)
    assert interrupted["saved"] is None
    assert (
        report.summary(RunOutcome("interrupted", 130), RESULT, SAVING, 1.0, 0, "")["saved"] is True
    )
    interrupted = report.summary(
        RunOutcome("interrupted", 130), RESULT, SAVING, 1.0, 0, "the disk is full"
    )
    assert interrupted["saved"] is False


def test_a_run_that_was_rolled_back_completely_has_added_nothing() -> None:
    resumed = JobResult(RESULT.status, resumed={"version": 9, "steps": 12, "samples": 400})

    assert report.this_run(resumed) == {"steps": 0, "samples": 0, "resumed_version": 9}


def test_the_summary_file_is_replaced_completely(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text("old")

    report.write_summary(path, {"status": "done"})

    assert json.loads(path.read_text()) == {"status": "done"}
    assert list(tmp_path.iterdir()) == [path]


def test_a_metric_that_is_not_finite_is_null_in_json_and_shown_in_tables(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    content = report.summary(
        RunOutcome("done"), JobResult({"metrics": {"loss": None}}, "f"), SETTINGS, 1.0, 0
    )

    report.write_summary(path, {**content, "best": float("inf")})

    assert "loss            not finite" in report.table(content)
    assert '"loss": null' in path.read_text()
    assert '"best": null' in path.read_text()


def test_a_failed_write_of_the_summary_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text("old")

    with pytest.raises(TypeError):
        report.write_summary(path, {"status": object()})

    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_to_a_summary_is_followed_and_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "there" / "summary.json")

    for status in ("failed", "done"):
        report.write_summary(link, {"status": status})

    assert link.is_symlink()
    assert json.loads((tmp_path / "there" / "summary.json").read_text()) == {"status": "done"}
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["summary.json"]


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        report.write_summary(path, {"status": "done"})

        assert json.loads(os.read(reader, 1000)) == {"status": "done"}
        assert path.is_fifo()
    finally:
        os.close(reader)


def test_the_table_of_a_successful_run() -> None:
    content = report.summary(RunOutcome("done"), RESULT, SETTINGS, 12.3, 1)

    assert report.table(content).splitlines() == [
        "  accuracy        0.987654",
        "  loss            0.25",
        "  steps           10  (320 samples)",
        "  goodput         90.0% of samples",
        "  seconds         12.3",
        "  policy          ssp 3",
        "  restarts        1",
        "  weights sha256  " + "f" * 64,
    ]


def test_unprintable_names_of_metrics_are_quoted_in_the_table() -> None:
    result = JobResult(
        {"metrics": {"": 1.0, "a\nb": 2.0, "test accuracy": 3.0, "µ": 4.0}}, "f" * 64
    )

    lines = report.table(report.summary(RunOutcome("done"), result, SETTINGS, 12.3, 0)).splitlines()

    assert [line.split("  ")[1] for line in lines[:4]] == ["''", r"'a\nb'", "test accuracy", "µ"]


def test_the_reason_for_missing_weights_is_in_summary_and_table() -> None:
    result = JobResult({"steps": 0}, None, "no worker has registered a model")

    content = report.summary(RunOutcome("done"), result, SETTINGS, 12.3, 0)

    assert content["problem"] == "no worker has registered a model"
    assert (
        report.table(content).splitlines()[-1]
        == "  weights sha256  unknown: no worker has registered a model"
    )


def test_the_box_has_process_code_remedy_log_and_last_lines() -> None:
    outcome = RunOutcome(
        "failed", 10, "s1", 10, "s1 exited with 10: taken", ("w0 was killed by SIGKILL",)
    )

    lines = report.box(outcome, Path("/logs/s1.log"), ["last words"], []).splitlines()

    assert "first failure: s1" in lines[0]
    assert lines[1:-1] == [
        "│ s1 exited with 10: taken",
        "│ earlier: w0 was killed by SIGKILL",
        "│ remedy: choose another one (port 0 picks a free port), or stop the process that uses it",
        "│ log: /logs/s1.log",
        "│",
        "│ last words",
    ]


def test_the_box_shows_a_traceback_instead_of_the_last_lines() -> None:
    lines = report.box(
        RunOutcome("failed", 1, "w0", 1, "w0 exited with 1"),
        None,
        ["tail"],
        ["Traceback", "ValueError"],
    )

    assert "│ ValueError" in lines
    assert "tail" not in lines


def test_the_box_of_an_idle_run_names_no_process() -> None:
    lines = report.box(
        RunOutcome("failed", 16, reason="nothing was trained"), Path("/logs"), [], []
    ).splitlines()

    assert lines[0].startswith("╭─ exit code 16 ─")
    assert lines[1] == "│ nothing was trained"
    assert "--allow-idle" in lines[2]
    assert lines[3] == "│ log: /logs"


def test_the_box_shows_the_end_of_a_long_traceback() -> None:
    traceback = [f"line {number}" for number in range(1000)]

    lines = report.box(RunOutcome("failed", 1, "w0", 1, "x"), None, [], traceback).splitlines()

    assert lines[-2] == "│ line 999"
    assert len(lines) < 100


@pytest.mark.parametrize(
    ("code", "retryable", "status", "text"),
    [
        (-9, True, 137, "was killed by SIGKILL"),
        (-11, True, 139, "was killed by SIGSEGV"),
        (
            20,
            True,
            20,
            "exited with 20: the servers were unreachable for too long, or dropped this worker",
        ),
        (21, True, 21, "exited with 21: too few workers"),
        (137, True, 137, "exited with 137: as if killed by SIGKILL"),
        (143, True, 143, "exited with 143: terminated (SIGTERM)"),
        (1, False, 1, "exited with 1: a bug in this system or in the training script"),
        (2, False, 2, "exited with 2: bad usage or configuration"),
        (10, False, 10, "exited with 10: a port or data directory is taken"),
        (14, False, 14, "exited with 14: a gradient contained NaN or Inf"),
        (16, False, 16, "exited with 16: the script never connected or never stepped"),
        (130, False, 130, "exited with 130: interrupted (Ctrl-C)"),
        (3, False, 3, "exited with 3"),
        (255, False, 255, "exited with 255"),
    ],
)
def test_exit_codes_are_described_and_classified(
    code: int, retryable: bool, status: int, text: str
) -> None:
    assert (is_retryable(code), exit_status(code), describe(code)) == (retryable, status, text)
