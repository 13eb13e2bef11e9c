"""The lease directory: one of concurrent swaps succeeds; a stopped server blocks no other."""

import errno
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pscommon.core.errors import TakenError
from psserver.core.shard.failover import PrimaryRecord
from psserver.process.config import ServerConfig
from psserver.replication.lease_directory import LeaseDirectory, begin_primary, lease_of
from tests.support.ports import free_ports

FIRST = PrimaryRecord(1, "a")


@pytest.fixture
def lease(tmp_path: Path) -> LeaseDirectory:
    return LeaseDirectory(tmp_path, 0)


def test_the_first_server_finds_no_primary(lease: LeaseDirectory) -> None:
    assert lease.read() is None
    assert lease.swap(None, FIRST)
    assert lease.read() == FIRST


def test_a_swap_requires_the_current_value(lease: LeaseDirectory) -> None:
    lease.swap(None, FIRST)

    assert not lease.swap(None, PrimaryRecord(1, "b"))
    assert not lease.swap(PrimaryRecord(1, "a", "s"), PrimaryRecord(2, "s"))
    assert lease.read() == FIRST
    assert lease.swap(FIRST, PrimaryRecord(1, "a", "s"))


def test_exactly_one_of_many_concurrent_swaps_wins(tmp_path: Path) -> None:
    LeaseDirectory(tmp_path, 0).swap(None, FIRST)

    def swap(name: int) -> bool:
        return LeaseDirectory(tmp_path, 0).swap(FIRST, PrimaryRecord(2, str(name)))

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(swap, range(40)))

    assert sum(won) == 1
    assert LeaseDirectory(tmp_path, 0).read() == PrimaryRecord(2, str(won.index(True)))


def test_a_swap_during_another_successful_one_fails(
    lease: LeaseDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that it found is removed before it is read."""
    lease.swap(None, FIRST)
    read_text = Path.read_text

    def late(path: Path) -> str:
        monkeypatch.setattr(Path, "read_text", read_text)
        assert LeaseDirectory(tmp_path, 0).swap(FIRST, PrimaryRecord(2, "b"))
        return read_text(path)

    monkeypatch.setattr(Path, "read_text", late)

    assert not lease.swap(FIRST, PrimaryRecord(2, "late"))
    assert lease.read() == PrimaryRecord(2, "b")


def test_a_delayed_swap_fails(
    lease: LeaseDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number is free again, because old files are removed."""
    lease.swap(None, FIRST)
    link = os.link

    def late(source: Any, target: Any) -> None:
        monkeypatch.setattr(os, "link", link)
        other = LeaseDirectory(tmp_path, 0)
        assert other.swap(FIRST, PrimaryRecord(2, "b"))
        assert other.swap(PrimaryRecord(2, "b"), PrimaryRecord(3, "c"))
        link(source, target)

    monkeypatch.setattr(os, "link", late)

    assert not lease.swap(FIRST, PrimaryRecord(2, "late"))
    assert lease.read() == PrimaryRecord(3, "c")


def test_a_tenure_is_on_disk_before_it_is_visible(
    lease: LeaseDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a power cut may leave an empty file under its name, which no server could read."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    link = os.link

    def checked(source: Path, target: Path) -> None:
        assert synced == [source.stat().st_size] != [0]
        link(source, target)

    monkeypatch.setattr(os, "link", checked)

    assert lease.swap(None, FIRST)
    assert len(list((tmp_path / "shard-0").iterdir())) == 1


def test_a_full_disk_leaves_no_partial_file(
    lease: LeaseDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "fsync", full)

    with pytest.raises(OSError, match="no space"):
        lease.swap(None, FIRST)
    assert not list((tmp_path / "shard-0").iterdir())


def test_the_directory_stays_small(lease: LeaseDirectory, tmp_path: Path) -> None:
    lease.swap(None, FIRST)
    for term in range(1, 9):
        assert lease.swap(PrimaryRecord(term, "a"), PrimaryRecord(term + 1, "a"))

    assert len(list((tmp_path / "shard-0").iterdir())) == 1


@pytest.mark.parametrize(("in_sync", "term"), [("", 2), ("s", None)])
def test_a_server_started_as_primary_does_not_wait_for_its_standby(
    tmp_path: Path, in_sync: str, term: int | None
) -> None:
    """While its standby is in sync it must not be primary: the standby may have taken over."""
    config = ServerConfig(failover_lock=tmp_path)
    (dead,) = free_ports(1)
    LeaseDirectory(tmp_path, 0).swap(None, PrimaryRecord(1, f"127.0.0.1:{dead}", in_sync))

    if term is None:
        with pytest.raises(TakenError) as refused:
            begin_primary(config, lease_of(config), "here:1")
        assert refused.value.reason == "TAKEN"
    else:
        assert begin_primary(config, lease_of(config), "here:1") == PrimaryRecord(term, "here:1")


def test_an_operator_can_declare_the_standby_lost_as_the_error_describes(tmp_path: Path) -> None:
    """The term grows for all servers. The declaration is for one standby, not for later ones."""
    config = ServerConfig(failover_lock=tmp_path)
    lease, (dead,) = LeaseDirectory(tmp_path, 0), free_ports(1)
    lease.swap(None, PrimaryRecord(3, f"127.0.0.1:{dead}", "s"))
    with pytest.raises(TakenError) as refused:
        begin_primary(config, lease_of(config), "here:1")
    found = re.search(r"`touch (\S+)`", str(refused.value))
    assert found is not None

    Path(found[1]).touch()

    assert begin_primary(config, lease_of(config), "here:1") == PrimaryRecord(4, "here:1")
    lease.swap(PrimaryRecord(4, "here:1"), PrimaryRecord(4, "here:1", "t"))
    with pytest.raises(TakenError):
        begin_primary(config, lease_of(config), "here:1")
