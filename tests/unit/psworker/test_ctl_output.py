"""Numbers with units, and results that cannot be printed."""

import os
import subprocess
import sys

import pytest

from psworker.ctl.output import duration, number, size


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (None, ""),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (12_345_678, "12.3 MB"),
        (999_600, "1 MB"),
        (5e15, "5e+03 TB"),
    ],
)
def test_size(nbytes: float | None, text: str) -> None:
    assert size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""),
        (0.25, "0.25 s"),
        (59.94, "59.9 s"),
        (60, "1 m 0 s"),
        (200.4, "3 m 20 s"),
        (7500, "2 h 5 m"),
    ],
)
def test_duration(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, ""), (12345678, "12345678"), (0.123456, "0.1235"), (128.0, "128")]
)
def test_number(value: float | None, text: str) -> None:
    assert number(value) == text


PRINTS = """
import sys, click
from pscommon.settings.command import run_command
from psworker.ctl.output import Table, show
table = Table("", (), [("für",)])
values = {"for": "für"}
command = click.Command("ps-ctl", callback=lambda: show(sys.argv[1], values, lambda: [table]))
sys.exit(run_command(command, lambda ctx: 0, []))
"""


def run_show(form: str, where: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Print a result as commands of ps-ctl do. where: a shell redirection of stdout."""
    line = ["sh", "-c", f'exec "$@" {where}', "sh", sys.executable, "-c", PRINTS, form]
    return subprocess.run(
        line, env=os.environ | environment, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("form", ["table", "json"])
@pytest.mark.parametrize(
    ("where", "why"), [(">/dev/full", "No space left on device"), (">&-", "stdout is closed")]
)
def test_a_result_that_cannot_be_printed_is_an_error(form: str, where: str, why: str) -> None:
    done = run_show(form, where)

    assert done.returncode == 2
    assert done.stderr.startswith(f"ps-ctl: INVALID_REQUEST: cannot print the result: {why} (")
    assert done.stderr.count("\n") == 1


def test_characters_that_stdout_cannot_encode_are_escaped() -> None:
    done = run_show("table", PYTHONIOENCODING="ascii")

    assert (done.returncode, done.stdout) == (0, "f\\xfcr\n")
