"""A data directory that other users can write is refused, or the log warns of it."""

import grp
import os
import pwd
import stat
from pathlib import Path
from unittest.mock import Mock

import pytest

from pscommon.core.errors import InvalidRequestError
from pscommon.snapshot import DataDirLock
from psserver.durability.data_formats import check_data_dir_mode
from tests.support.events import events

ME, ROOT, OTHER = 1000, 0, 1001


def owned(monkeypatch: pytest.MonkeyPatch, owner: int, mode: int, group: int = 50) -> Mock:
    """Return a directory with this owner, mode and group, seen by user ME."""
    monkeypatch.setattr(os, "geteuid", lambda: ME)
    facts = Mock(st_uid=owner, st_gid=group, st_mode=stat.S_IFDIR | mode)
    monkeypatch.setattr(pwd, "getpwuid", lambda user: Mock(pw_name=f"name{user}"))
    monkeypatch.setattr(grp, "getgrgid", lambda group: Mock(gr_name=f"name{group}"))
    return Mock(spec=Path, stat=lambda: facts, __str__=lambda self: "/data/job")


@pytest.mark.parametrize(
    ("owner", "mode"), [(ME, 0o700), (ME, 0o755), (ROOT, 0o755), (ROOT, 0o2775)]
)
@pytest.mark.parametrize("is_secured", [False, True])
def test_a_directory_of_the_user_or_of_root_is_accepted(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: int,
    mode: int,
    is_secured: bool,
) -> None:
    check_data_dir_mode(owned(monkeypatch, owner, mode), is_secured)

    assert not events(caplog)


@pytest.mark.parametrize(
    ("owner", "mode", "remedy"),
    [
        (ME, 0o777, "chmod go-w /data/job"),
        (ME, 0o1777, "chmod go-w /data/job"),
        (ME, 0o775, "chmod go-w /data/job"),
        (ROOT, 0o777, "chmod go-w /data/job"),
        (OTHER, 0o700, "a directory of the user that runs the server"),
    ],
)
def test_a_directory_that_others_can_write_is_refused_or_warned_of(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: int,
    mode: int,
    remedy: str,
) -> None:
    data_dir = owned(monkeypatch, owner, mode)
    check_data_dir_mode(data_dir, is_secured=False)
    assert "data_dir_writable" in events(caplog)
    with pytest.raises(InvalidRequestError) as caught:
        check_data_dir_mode(data_dir, is_secured=True)

    assert f"its mode is {mode:04o} and its owner is user {owner}" in str(caught.value)
    assert str(caught.value).endswith(f"Try: {remedy}")
    assert caught.value.exit_code == 2


def test_the_group_of_the_user_alone_may_write(monkeypatch: pytest.MonkeyPatch) -> None:
    check_data_dir_mode(owned(monkeypatch, ME, 0o775, group=ME), is_secured=True)


def test_a_directory_that_the_server_creates_is_accepted(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with DataDirLock(tmp_path / "job", 0):
            check_data_dir_mode(tmp_path / "job", is_secured=True)
    finally:
        os.umask(before)
