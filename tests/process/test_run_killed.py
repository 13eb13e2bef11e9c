"""ps-run reports killed workers to the servers and removes folders of killed runs."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pscommon.system.process_id import process_id
from psworker.run.folders import OWNER, make_folder
from tests.support.run_bench import LIMIT, Bench, bench_in
from tests.support.workers import until

DIES_ONCE = """
import os, signal
from pathlib import Path
rank, attempt = os.environ["PS_WORKER_RANK"], os.environ["PS_WORKER_ATTEMPT"]
Path(f"pid-{rank}-{attempt}").write_text(str(os.getpid()))
if (rank, attempt) == ("1", "0"):
    os.kill(os.getpid(), signal.SIGKILL)
"""

WAITS = """
import signal
from pathlib import Path
Path("began").touch()
signal.pause()
"""


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with bench_in(tmp_path) as bench:
        yield bench


def test_a_killed_worker_is_reported_to_the_servers(bench: Bench) -> None:
    """The exit of a worker that finished is not reported."""
    result = bench.run("--workers", "2", bench.script(DIES_ONCE))
    assert result.returncode == 0, result.stderr

    (line,) = (bench.folder / "reported").read_text().splitlines()
    name, _, reason = line.partition(" ")
    assert reason == "its process was killed by SIGKILL"
    assert name.split("/")[2] == (bench.folder / "pid-1-0").read_text()


def killed_run(bench: Bench) -> "subprocess.Popen[str]":
    (bench.folder / "began").unlink(missing_ok=True)
    run = bench.popen(bench.script(WAITS))
    until(lambda: (bench.folder / "began").exists(), "a worker at work")
    run.kill()
    run.wait(LIMIT)
    return run


def test_the_next_run_removes_the_folder_of_a_killed_run(bench: Bench) -> None:
    killed_run(bench)
    (left,) = bench.temporary.glob("ps-run-*")
    assert (left / OWNER).exists()

    assert bench.run("--workers", "1", bench.script("")).returncode == 0
    assert list(bench.temporary.glob("ps-run-*")) == []


def test_folders_that_are_not_stale_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """These are folders of a live run, of a run that preserved its logs, of another boot, and
    targets of links.
    """
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    running = make_folder("ps-run-")
    with_logs, elsewhere, target = (
        tmp_path / name for name in ("ps-run-kept", "ps-run-elsewhere", "target")
    )
    for folder in (with_logs, elsewhere, target):
        folder.mkdir()
    (with_logs / "w0.log").write_text("precious")
    (elsewhere / OWNER).write_text("another-boot/7/1/1")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as ended:
        name = process_id(ended.pid)
        ended.send_signal(signal.SIGKILL)
    (target / OWNER).write_text(name)
    (tmp_path / "ps-run-link").symlink_to(target)

    newest = make_folder("ps-run-")
    assert {path.name for path in tmp_path.iterdir()} == {
        running.name,
        newest.name,
        with_logs.name,
        elsewhere.name,
        "target",
        "ps-run-link",
    }
    assert (target / OWNER).exists()

    (tmp_path / "ps-run-link").unlink()
    target.rename(tmp_path / "ps-run-stale")
    make_folder("ps-run-")
    assert not (tmp_path / "ps-run-stale").exists()
    assert os.listdir(with_logs) == ["w0.log"]
