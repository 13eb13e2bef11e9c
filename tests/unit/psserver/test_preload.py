"""psserver.preload becomes the server that its arguments describe, or ends."""

import subprocess
import sys

import pytest


@pytest.mark.full
@pytest.mark.parametrize(
    ("line", "code", "message"),
    [("", 0, ""), ('["--shard", "2/2"]\n', 2, "ps-server")],
    ids=["not needed", "bad usage"],
)
def test_preload_runs_ps_server_with_the_arguments_that_it_reads(
    line: str, code: int, message: str
) -> None:
    command = [sys.executable, "-P", "-m", "psserver.preload"]
    done = subprocess.run(
        command, input=line, capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert bool(done.stderr) == bool(message)
