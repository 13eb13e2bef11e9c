"""Reported values in ps-run: the file of --history, and the summary."""

import csv
import math
import os
import threading
from pathlib import Path

import pytest

from pscommon.core.errors import InvalidRequestError
from pscommon.core.metric_row import MetricRow
from psworker.run.cli import check_output
from psworker.run.summary import COLUMNS, digest, table, write_csv

BEGAN = 1_700_000_000.25
ROWS = [
    MetricRow(BEGAN, 0, 2, 1, "loss", 9.0),
    MetricRow(BEGAN + 0.5, 1, 1, 0, "loss", 2.5),
    MetricRow(BEGAN + 1.0, 2, 1, 0, "loss", math.nan),
    MetricRow(BEGAN + 2.0, 3, 1, 0, "loss", 0.5),
    MetricRow(BEGAN + 3.0, 3, 2, 1, "loss", 0.25),
    MetricRow(BEGAN + 4.0, 4, 1, 0, 'a "name", quoted', math.inf),
]


def test_the_history_file_has_a_line_for_each_value(tmp_path: Path) -> None:
    write_csv(tmp_path / "h.csv", ROWS)

    with open(tmp_path / "h.csv", newline="") as file:
        lines = list(csv.reader(file))
    assert (
        tuple(lines[0])
        == COLUMNS
        == ("time", "seconds", "version", "worker", "rank", "name", "value")
    )
    assert lines[1] == ["2023-11-14T22:13:20.250Z", "0.000", "0", "2", "1", "loss", "9.0"]
    assert lines[3][1:] == ["1.000", "2", "1", "0", "loss", "nan"]
    assert lines[6][1:] == ["4.000", "4", "1", "0", 'a "name", quoted', "inf"]
    assert math.isnan(float(lines[3][6]))


def test_the_history_file_of_a_run_without_values_has_only_columns(tmp_path: Path) -> None:
    write_csv(tmp_path / "h.csv", [])

    assert (tmp_path / "h.csv").read_text() == ",".join(COLUMNS) + "\n"


def test_the_history_can_be_written_to_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    write_csv(tmp_path / "pipe", ROWS)
    reader.join(30)

    assert read[0].count("\n") == 7


def test_the_digest_uses_the_values_of_the_lowest_rank() -> None:
    found = digest(ROWS)

    assert found["loss"] == {"rows": 3, "first": 2.5, "last": 0.5, "least": 0.5, "greatest": 2.5}
    assert found['a "name", quoted'] == {
        "rows": 1,
        "first": math.inf,
        "last": math.inf,
        "least": None,
        "greatest": None,
    }


def test_the_table_shows_first_least_and_greatest_values() -> None:
    content = {
        "metrics": {"accuracy": 0.97, "loss": 0.5, "norm": None},
        "history": digest(ROWS),
        "steps": 4,
        "samples": 8,
        "goodput": None,
        "seconds": 1.0,
        "policy": "sync",
        "staleness": None,
        "restarts": 0,
        "weights_sha256": "ab",
        "saved": None,
        "this_run": {"steps": 4, "samples": 8, "resumed_version": None},
    }
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in table(content).splitlines()}

    assert lines["loss"] == "0.5  (first 2.5, least 0.5, greatest 2.5)"
    assert lines["accuracy"] == "0.97"
    assert lines["norm"] == "not finite"


@pytest.mark.parametrize("flag", ["--history", "--summary"])
def test_an_unwritable_path_is_refused_before_the_training(tmp_path: Path, flag: str) -> None:
    with pytest.raises(
        InvalidRequestError, match=f"`{flag} .*its folder does not exist or is not writable"
    ):
        check_output(flag, tmp_path / "nowhere" / "h.csv")
    check_output(flag, tmp_path / "h.csv")
