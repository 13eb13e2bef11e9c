"""One process per shard and directory; a second one learns which process holds the lock."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pscommon.core.errors import InvalidRequestError, TakenError
from pscommon.snapshot import DataDirLock

HOLDER = """
import sys
from pathlib import Path
from pscommon.snapshot.data_dir_lock import DataDirLock
with DataDirLock(Path(sys.argv[1]), 1):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_learns_the_holder(tmp_path: Path) -> None:
    with DataDirLock(tmp_path, 0), pytest.raises(TakenError) as raised, DataDirLock(tmp_path, 0):
        pass

    assert raised.value.exit_code == 10
    assert f"data directory {tmp_path} is in use: process {os.getpid()} serves shard 0" in str(
        raised.value
    )


def test_another_process_holds_the_lock_until_it_dies(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(TakenError, match=f"process {holder.pid}"), DataDirLock(tmp_path, 1):
                pass
        finally:
            holder.kill()
        holder.wait(30)
    assert (tmp_path / "shard-1.lock").exists()
    with DataDirLock(tmp_path, 1):
        assert (tmp_path / "shard-1.lock").read_text() == f"{os.getpid()}\n"


def test_shards_share_a_directory(tmp_path: Path) -> None:
    with DataDirLock(tmp_path / "new" / "dir", 0), DataDirLock(tmp_path / "new" / "dir", 1):
        assert sorted(path.name for path in (tmp_path / "new" / "dir").iterdir()) == [
            "shard-0.lock",
            "shard-1.lock",
        ]


def test_a_released_lock_leaves_no_file_and_can_be_taken_again(tmp_path: Path) -> None:
    lock = DataDirLock(tmp_path, 0)
    for _ in range(2):
        with lock:
            assert lock.path.exists()
        assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_removed_does_not_hide_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder of another user."""

    def refused(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refused)
        with pytest.raises(LookupError), DataDirLock(tmp_path, 0):
            raise LookupError
    with DataDirLock(tmp_path, 0):
        pass


def test_a_release_during_another_attempt_never_admits_two_holders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process has opened the file that the holder removes; a lock on it would be
    worthless.
    """
    import fcntl

    first, second = DataDirLock(tmp_path, 0), DataDirLock(tmp_path, 0)
    first.__enter__()
    real = fcntl.flock

    def leave_first(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real)
        first.__exit__(None, None, None)
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", leave_first)
    with second, pytest.raises(TakenError), DataDirLock(tmp_path, 0):
        pass


def test_a_directory_that_cannot_be_used_is_bad_configuration(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequestError, match=f"cannot use data directory {tmp_path / 'file'}"):
        DataDirLock(tmp_path / "file", 0).__enter__()


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_in_place_of_the_lock_is_refused_and_its_target_unchanged(
    tmp_path: Path, exists: bool
) -> None:
    """Another user who may write in the folder must not make this process empty one of its
    files.
    """
    target = tmp_path / "target"
    if exists:
        target.write_text("precious")
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "shard-0.lock"
    path.symlink_to(target)

    with pytest.raises(InvalidRequestError) as raised, DataDirLock(tmp_path / "data", 0):
        pass

    assert raised.value.exit_code == 2
    assert str(raised.value) == f"cannot lock shard 0: {path} is a symbolic link. Try: rm {path}"
    assert target.exists() is exists
    assert not exists or target.read_text() == "precious"


def test_a_full_disk_is_locked_without_the_holders_pid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is valid; only its holder is unknown to others."""

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with (
        DataDirLock(tmp_path, 0),
        pytest.raises(TakenError, match="process unknown"),
        DataDirLock(tmp_path, 0),
    ):
        pass
