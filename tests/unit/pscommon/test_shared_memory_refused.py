"""Regions that cannot be shared or must not be attached, each with its reason."""

import mmap
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pscommon.system.shared_memory import (
    MemoryOffer,
    NoSharedMemoryError,
    NotSharedError,
    SharedRegion,
    attach,
    sweep,
)

NOBODY = 65534

# tries to share 4 MiB in the small folder and prints the error
TOO_LARGE = """
import os, sys
from pathlib import Path
from pscommon.system.shared_memory import NoSharedMemoryError, SharedRegion
region = SharedRegion(4 << 20, Path(sys.argv[1]))
region.memory[:3] = b"abc"
try:
    region.share()
except NoSharedMemoryError as error:
    print(error)
assert os.listdir(sys.argv[1]) == [], os.listdir(sys.argv[1])
assert bytes(region.memory[:4]) == b"abc\\0" and not region.is_shared
small = SharedRegion(100_000, Path(sys.argv[1]))
if sys.argv[2] == "fits":
    small.share()
    small.memory[:] = bytes(100_000)
small.close()
"""


@pytest.fixture
def region(tmp_path: Path) -> Iterator[SharedRegion]:
    region = SharedRegion(5000, tmp_path)
    yield region
    region.close()


def in_tmpfs(options: str, folder: Path, *arguments: str) -> str:
    """Return what TOO_LARGE prints with a private tmpfs at the folder."""
    mount = f'mount -t tmpfs -o {options} none "$0"'
    unshare = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*unshare, mount, str(folder)], capture_output=True, timeout=60).returncode:
        pytest.skip("this user may not mount a tmpfs in a mount namespace of its own")
    script = f'{mount} && exec "$1" -c "$2" "$0" "$3"'
    done = subprocess.run(
        [*unshare, script, str(folder), sys.executable, TOO_LARGE, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_small_tmpfs_is_an_error_at_once_with_numbers_and_remedy(tmp_path: Path) -> None:
    message = in_tmpfs("size=1m", tmp_path, "fits")

    assert f"{tmp_path} is too small: 4.0 MiB are needed and 1.0 MiB are free" in message
    assert "shm_size" in message
    assert "--lanes grpc" in message


def test_a_read_only_tmpfs_is_an_error(tmp_path: Path) -> None:
    assert "Read-only file system" in in_tmpfs("ro", tmp_path, "")


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder, words in (
        (tmp_path / "missing", "No such file"),
        (tmp_path / "file", "Not a directory"),
    ):
        region = SharedRegion(10, folder)
        with pytest.raises(NoSharedMemoryError, match=f"{folder}: {words}"):
            region.share()
        assert not region.is_shared
        assert sweep(folder) == []
        region.close()


def test_a_failed_share_leaves_the_former_one(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    region = SharedRegion(10, folder)
    attached = attach(region.share(), folder)
    region.hide()
    folder.rmdir()
    with pytest.raises(NoSharedMemoryError):
        region.share()

    region.memory[0] = 3
    assert region.is_shared
    assert attached[0] == 3
    region.close()


def test_other_systems_cannot_share(region: SharedRegion, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(NoSharedMemoryError, match="darwin"):
        region.share()


@pytest.mark.parametrize("umask", [0, 0o777])
def test_only_the_owner_has_access_for_any_umask(
    umask: int, region: SharedRegion, tmp_path: Path
) -> None:
    before = os.umask(umask)
    try:
        offer = region.share()
    finally:
        os.umask(before)

    assert stat.S_IMODE((tmp_path / offer.name).stat().st_mode) == 0o600
    attach(offer, tmp_path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o610, 0o601])
def test_a_file_accessible_for_others_is_refused(
    mode: int, region: SharedRegion, tmp_path: Path
) -> None:
    offer = region.share()
    (tmp_path / offer.name).chmod(mode)

    with pytest.raises(NotSharedError, match=f"accessible to others: mode {mode:04o}"):
        attach(offer, tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(region: SharedRegion, tmp_path: Path) -> None:
    offer = region.share()
    os.chown(tmp_path / offer.name, NOBODY, NOBODY)
    with pytest.raises(NotSharedError, match=f"belongs to user {NOBODY}"):
        attach(offer, tmp_path)

    other = tmp_path / ("paramserver-" + "0" * 32)
    other.write_text("")
    os.chown(other, NOBODY, NOBODY)
    assert sweep(tmp_path) == []


def symlink(path: Path) -> None:
    path.rename(path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (Path.unlink, "No such file"),
        (symlink, "is a symlink"),
        (pipe, "not a regular file"),
        (folder, "Is a directory"),
        (lambda path: os.truncate(path, 9000), "has 9000 bytes"),
        (lambda path: os.truncate(path, 0), "has 0 bytes"),
    ],
)
def test_a_path_that_is_no_regular_file_is_refused(
    change: Callable[[Path], None], words: str, region: SharedRegion, tmp_path: Path
) -> None:
    offer = region.share()
    change(tmp_path / offer.name)

    with pytest.raises(NotSharedError, match=words):
        attach(offer, tmp_path)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"token": bytes(32)}, "another token"),
        ({"token": b""}, "another token"),
        ({"nbytes": 4999}, "has .* bytes"),
        ({"nbytes": -1}, "has .* bytes"),
        ({"name": "paramserver-" + "0" * 32}, "No such file"),
        ({"name": "../paramserver-" + "0" * 32}, "not a name"),
        ({"name": ""}, "not a name"),
    ],
)
def test_an_offer_for_another_file_is_refused(
    wrong: dict[str, object], words: str, region: SharedRegion, tmp_path: Path
) -> None:
    offer: MemoryOffer = replace(region.share(), **wrong)  # type: ignore[arg-type]

    with pytest.raises(NotSharedError, match=words):
        attach(offer, tmp_path)


def test_an_offer_of_a_negative_size_is_refused(region: SharedRegion, tmp_path: Path) -> None:
    """The file has the size that such an offer implies, and holds the token."""
    offer = region.share()
    os.truncate(tmp_path / offer.name, mmap.PAGESIZE - 1)

    with pytest.raises(NotSharedError, match=f"has {mmap.PAGESIZE - 1} bytes"):
        attach(replace(offer, nbytes=-1), tmp_path)


def test_a_hidden_region_cannot_be_attached(region: SharedRegion, tmp_path: Path) -> None:
    offer = region.share()
    region.hide()

    with pytest.raises(NotSharedError, match="No such file"):
        attach(offer, tmp_path)
