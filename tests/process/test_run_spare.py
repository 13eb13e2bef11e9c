"""ps-run keeps a server ahead for those that have to be started again."""

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


def spare_of(bench: Bench, before: int = 0) -> int:
    """The spare server's pid, once it is another one than before."""
    path = bench.folder / "spare"
    return until(
        lambda: path.exists() and (found := int(path.read_text())) != before and found,
        "a spare server",
    )


def server_of(run: "subprocess.Popen[str]") -> int:
    """The pid that the next server says."""
    assert run.stdout is not None
    return next(int(line.split()[2]) for line in run.stdout if line.startswith("[s0] server"))


def test_a_spare_server_takes_the_place_of_one_that_was_killed(bench: Bench) -> None:
    """Its arguments and its exit code are those of any server, and soon there is another spare
    one.
    """
    run = bench.popen("--servers", "1", "--workers", "1", "--data-dir", "data", bench.script(WAITS))
    first = server_of(run)
    spare = spare_of(bench)
    os.kill(first, signal.SIGKILL)
    assert server_of(run) == spare
    another = spare_of(bench, before=spare)
    (bench.folder / "done").touch()
    out, err = run.communicate(timeout=LIMIT)

    assert run.returncode == 0, out + err
    assert "s0 was killed by SIGKILL; restart 1 of at most 3" in err
    assert not Path(f"/proc/{another}").exists()


def test_a_spare_server_that_has_died_is_not_missed(bench: Bench) -> None:
    run = bench.popen("--servers", "1", "--workers", "1", "--data-dir", "data", bench.script(WAITS))
    first, spare = server_of(run), spare_of(bench)
    os.kill(spare, signal.SIGKILL)
    os.kill(first, signal.SIGKILL)
    again = server_of(run)
    (bench.folder / "done").touch()
    run.communicate(timeout=LIMIT)

    assert (run.returncode, again in (first, spare)) == (0, False)


@pytest.mark.parametrize("flags", [(), ("--data-dir", "data", "--max-restarts", "0")])
def test_there_is_no_spare_server_where_none_could_be_of_use(
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
