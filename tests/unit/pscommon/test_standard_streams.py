"""A command whose standard streams were closed prints into none of its files."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_replaced(closed: str, tmp_path: Path) -> None:
    script = f"""
import os, sys, click
from pscommon.settings.command import run_command

def start():
    with open({str(tmp_path / "data")!r}, "w") as data:
        print("an error", file=sys.stderr, flush=True)
        for number in range(3):
            assert os.get_inheritable(number)
        os.write(1, b"from a library")
        os.write(2, b"from a library")
        assert data.fileno() > 2

sys.exit(run_command(click.Command("any", callback=start), lambda ctx: 0, []))
"""
    line = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", script]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)

    assert (done.returncode, (tmp_path / "data").read_text()) == (0, ""), done.stderr
