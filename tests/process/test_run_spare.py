"""ps-run keeps a spare server process to replace servers that it restarts."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.run_bench import LIMIT, Bench, bench_in
from tests.support.workers import until


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with bench_in(tmp_path) as bench:
        yield bench


WAITS = """
import threading
from pathlib import Path
while not Path("done").exists():
    threading.Event().wait(0.01)
"""


def spare_pid(bench: Bench, before: int = 0) -> int:
    """Return the PID of the spare server as soon as it differs from `before`."""
    path = bench.folder / "spare"
    return until(
        lambda: path.exists() and (found := int(path.read_text())) != before and found,
        "a spare server",
    )


def next_server_pid(run: "subprocess.Popen[str]") -> int:
    """Return the PID that the next started server prints."""
    assert run.stdout is not None
    return next(int(line.split()[2]) for line in run.stdout if line.startswith("[s0] server"))


def test_a_spare_server_replaces_a_killed_server(bench: Bench) -> None:
    """It has the arguments and the exit code of any server; ps-run then starts another spare
    server.
    """
    run = bench.popen("--servers", "1", "--workers", "1", "--data-dir", "data", bench.script(WAITS))
    first = next_server_pid(run)
    spare = spare_pid(bench)
    os.kill(first, signal.SIGKILL)
    assert next_server_pid(run) == spare
    another = spare_pid(bench, before=spare)
    (bench.folder / "done").touch()
    out, err = run.communicate(timeout=LIMIT)

    assert run.returncode == 0, out + err
    assert "s0 was killed by SIGKILL; restart 1 of at most 3" in err
    assert not Path(f"/proc/{another}").exists()


def test_a_server_restarts_although_its_spare_was_killed(bench: Bench) -> None:
    run = bench.popen("--servers", "1", "--workers", "1", "--data-dir", "data", bench.script(WAITS))
    first, spare = next_server_pid(run), spare_pid(bench)
    os.kill(spare, signal.SIGKILL)
    os.kill(first, signal.SIGKILL)
    again = next_server_pid(run)
    (bench.folder / "done").touch()
    run.communicate(timeout=LIMIT)

    assert (run.returncode, again in (first, spare)) == (0, False)


@pytest.mark.parametrize("flags", [(), ("--data-dir", "data", "--max-restarts", "0")])
def test_a_run_that_cannot_restart_servers_has_no_spare_server(
    bench: Bench, flags: tuple[str, ...]
) -> None:
    run = bench.popen(
        "--servers",
        "1",
        "--workers",
        "1",
        *flags,
        bench.script("import threading; threading.Event().wait(1)"),
    )
    run.communicate(timeout=LIMIT)

    assert (run.returncode, (bench.folder / "spare").exists()) == (0, False)
