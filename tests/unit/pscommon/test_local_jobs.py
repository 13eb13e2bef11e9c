"""Files by which commands find the jobs of this user on this machine."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pscommon.core.errors import InvalidRequestError
from pscommon.system import local_jobs
from pscommon.system.local_jobs import JobAnnouncement, LocalJob, only_local_job

RUN = """
import sys
from pscommon.system.local_jobs import JobAnnouncement
JobAnnouncement(sys.argv[1], sys.argv[2])
print("announced", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set XDG_RUNTIME_DIR for this test."""
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder


@pytest.fixture
def fallback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace /tmp/paramserver-UID by a folder that does not exist yet."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(local_jobs, "FALLBACK", f"{tmp_path}/paramserver-{{uid}}")
    return tmp_path / f"paramserver-{os.geteuid()}"


@pytest.fixture
def other(runtime: Path) -> Iterator["subprocess.Popen[str]"]:
    """Start another process with its own job."""
    command = [sys.executable, "-c", RUN, "theirs", "127.0.0.1:2"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "announced\n"
        yield process
        process.kill()


def test_a_job_is_listed_until_its_file_is_removed(runtime: Path) -> None:
    announcement = JobAnnouncement("mine", "127.0.0.1:1")

    assert [(job.job, job.address, job.pid) for job in local_jobs.local_jobs()] == [
        ("mine", "127.0.0.1:1", os.getpid())
    ]
    announcement.remove()
    announcement.remove()
    assert local_jobs.local_jobs() == []


def test_folder_and_file_are_private(runtime: Path) -> None:
    JobAnnouncement("mine", "127.0.0.1:1")
    (file,) = (runtime / "paramserver").iterdir()

    assert stat.S_IMODE((runtime / "paramserver").stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_token_is_in_the_file_and_in_no_text(runtime: Path) -> None:
    """Messages list jobs."""
    JobAnnouncement("mine", "127.0.0.1:1", "admin", "0123456789abcdef")
    (job,) = local_jobs.local_jobs()

    assert (job.role, job.token) == ("admin", "0123456789abcdef")
    assert "0123456789abcdef" not in f"{job} {job!r}"


def test_another_shard_has_a_file_and_is_no_job(runtime: Path) -> None:
    """An earlier release lists the files that end in .json."""
    JobAnnouncement("mine", "127.0.0.1:1", "admin", "0123456789abcdef")
    shard = JobAnnouncement("mine", "127.0.0.1:2", "server", "fedcba9876543210", shard=1)

    assert [job.address for job in local_jobs.local_jobs()] == ["127.0.0.1:1"]
    assert only_local_job("no address").address == "127.0.0.1:1"
    assert [
        (entry.address, entry.shard, entry.role, entry.token) for entry in local_jobs.local_shards()
    ] == [
        ("127.0.0.1:1", 0, "admin", "0123456789abcdef"),
        ("127.0.0.1:2", 1, "server", "fedcba9876543210"),
    ]
    assert len(list((runtime / "paramserver").glob("*.json"))) == 1
    shard.remove()
    assert [entry.shard for entry in local_jobs.local_shards()] == [0]


def test_a_file_of_an_earlier_release_has_no_token(runtime: Path) -> None:
    JobAnnouncement("mine", "127.0.0.1:1", "admin", "0123456789abcdef")
    (file,) = (runtime / "paramserver").iterdir()
    written = json.loads(file.read_text())
    file.write_text(json.dumps({name: written[name] for name in ("job", "address", "pid")}))
    without_process = local_jobs.local_jobs()
    file.write_text(json.dumps({**written, "token": 7}))
    invalid = local_jobs.local_jobs()
    del written["role"], written["token"], written["shard"]
    file.write_text(json.dumps(written))

    assert [(job.address, job.role, job.token) for job in local_jobs.local_jobs()] == [
        ("127.0.0.1:1", "", "")
    ]
    assert without_process == invalid == []


def test_the_file_of_a_killed_process_is_removed(
    runtime: Path, other: "subprocess.Popen[str]"
) -> None:
    assert [job.job for job in local_jobs.local_jobs()] == ["theirs"]

    other.kill()
    other.wait()

    assert local_jobs.local_jobs() == []
    assert list((runtime / "paramserver").iterdir()) == []


def test_the_file_of_a_zombie_process_is_removed(
    runtime: Path, other: "subprocess.Popen[str]"
) -> None:
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # the process is a zombie

    assert local_jobs.local_jobs() == []


def test_a_later_process_with_the_same_pid_is_another_process(runtime: Path) -> None:
    JobAnnouncement("mine", "127.0.0.1:1")
    (file,) = (runtime / "paramserver").iterdir()
    entry = json.loads(file.read_text())
    place, pid, started = entry["process"].rsplit("/", 2)
    file.write_text(json.dumps({**entry, "process": f"{place}/{pid}/{int(started) - 1}"}))

    assert local_jobs.local_jobs() == []
    assert not file.exists()


def test_processes_of_another_namespace_are_neither_listed_nor_removed(runtime: Path) -> None:
    JobAnnouncement("mine", "127.0.0.1:1")
    (file,) = (runtime / "paramserver").iterdir()
    file.write_text(json.dumps({**json.loads(file.read_text()), "process": "boot/1/1/1"}))

    assert local_jobs.local_jobs() == []
    assert file.exists()


def test_without_process_names_the_pid_decides(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_jobs, "process_id", lambda: "")
    JobAnnouncement("mine", "127.0.0.1:1")
    (file,) = (runtime / "paramserver").iterdir()
    assert [job.job for job in local_jobs.local_jobs()] == ["mine"]

    file.write_text(json.dumps({**json.loads(file.read_text()), "pid": 2**22 + 1}))
    assert local_jobs.local_jobs() == []
    assert not file.exists()


def test_foreign_files_are_unchanged(runtime: Path, tmp_path: Path) -> None:
    JobAnnouncement("mine", "127.0.0.1:1")
    folder = runtime / "paramserver"
    (mine,) = folder.iterdir()
    (tmp_path / "elsewhere").write_text(mine.read_text())
    (folder / "link.json").symlink_to(tmp_path / "elsewhere")
    (folder / "broken.json").write_text("{")
    (folder / "list.json").write_text("[]")
    (folder / "partial.json").write_text('{"job": "x"}')
    (folder / "wrong.json").write_text(json.dumps({**json.loads(mine.read_text()), "pid": "1"}))
    (folder / "huge.json").write_text(" " * 10**6)
    (folder / "folder.json").mkdir()
    os.mkfifo(folder / "pipe.json")

    assert [job.job for job in local_jobs.local_jobs()] == ["mine"]
    assert len(list(folder.iterdir())) == 9


def test_without_a_runtime_folder_a_folder_in_tmp_is_used(fallback: Path) -> None:
    JobAnnouncement("mine", "127.0.0.1:1")

    assert [job.job for job in local_jobs.local_jobs()] == ["mine"]
    assert stat.S_IMODE(fallback.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o722])
def test_a_runtime_folder_writable_for_others_is_not_used(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    monkeypatch.setattr(local_jobs, "FALLBACK", f"{runtime}/paramserver-{{uid}}")
    runtime.chmod(mode)
    JobAnnouncement("mine", "127.0.0.1:1")

    assert not (runtime / "paramserver").exists()


def test_a_link_in_place_of_the_folder_is_refused(fallback: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    fallback.symlink_to(tmp_path / "theirs")

    with pytest.raises(OSError, match="paramserver-"):
        JobAnnouncement("mine", "127.0.0.1:1")
    with pytest.raises(InvalidRequestError, match=r"^no address; local jobs cannot be listed: "):
        only_local_job("no address")
    assert list((tmp_path / "theirs").iterdir()) == []


@pytest.mark.parametrize("mode", [0o755, 0o777, 0o710])
def test_a_folder_readable_for_others_is_refused(fallback: Path, mode: int) -> None:
    fallback.mkdir()
    fallback.chmod(mode)

    with pytest.raises(PermissionError, match="only this user"):
        JobAnnouncement("mine", "127.0.0.1:1")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(fallback: Path) -> None:
    fallback.mkdir(mode=0o700)
    os.chown(fallback, 12345, 12345)

    with pytest.raises(PermissionError, match="only this user"):
        local_jobs.local_jobs()


def test_the_only_job_is_chosen(runtime: Path) -> None:
    JobAnnouncement("mine", "127.0.0.1:1")

    assert only_local_job("no address").address == "127.0.0.1:1"
    assert only_local_job("no address", "mine").address == "127.0.0.1:1"


def test_no_job_and_several_jobs_are_distinct_errors(
    runtime: Path, other: "subprocess.Popen[str]"
) -> None:
    JobAnnouncement("mine", "127.0.0.1:1")

    with pytest.raises(InvalidRequestError) as several:
        only_local_job("no address")
    with pytest.raises(InvalidRequestError) as absent:
        only_local_job("no address", "another")
    mine, theirs = (
        LocalJob("mine", "127.0.0.1:1", os.getpid()),
        LocalJob("theirs", "127.0.0.1:2", other.pid),
    )
    assert str(several.value) == (
        "no address; several jobs of this user run on this machine. Try: one of "
        + "; ".join(map(str, sorted([mine, theirs], key=lambda job: job.pid)))
    )
    assert (
        str(absent.value) == "no address; no job of this user called another runs on this machine"
    )
    assert only_local_job("no address", "theirs").pid == other.pid
