"""The number of shards of a job over restarts with an unchanged command line."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pscommon.core.errors import SnapshotError
from psserver.process.config import ServerConfig
from psserver.process.job_files import ShardCountFile
from psserver.roles.coordinator import read_shard_count
from psserver.server import Server
from tests.support.events import events


def test_a_restart_with_the_old_flags_keeps_the_current_number_of_shards(
    tmp_path: Path,
) -> None:
    shard_count = ShardCountFile(2, tmp_path)
    shard_count.change(3)
    shard_count.change(1)

    for given in (1, 2, 3):
        again = ShardCountFile(given, tmp_path)
        assert (again.shards, again.configured, again.changes, again.past) == (1, given, 2, {2, 3})


def test_a_changed_flag_sets_the_number_of_shards(tmp_path: Path) -> None:
    ShardCountFile(2, tmp_path).change(3)

    assert (ShardCountFile(4, tmp_path).shards, ShardCountFile(4, tmp_path).changes) == (4, 0)


def test_a_log_may_have_a_number_from_before_the_last_reshard(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Shard 0 writes the file before a reshard begins, and may die in between."""
    caplog.set_level(logging.INFO, "psserver")
    settings: dict[str, Any] = {
        "bind": "127.0.0.1:0",
        "data_dir": tmp_path,
        "durability": "log",
        "job": "otter",
    }
    first = Server(ServerConfig(shards=1, **settings))
    first.start()
    first.close()
    (tmp_path / "layout").write_text(json.dumps({"shards": 3, "past": [1, 2], "changes": 2}))

    again = Server(ServerConfig(shards=2, **settings))
    again.start()
    again.close()

    assert again.identity.shards == 1
    assert "job_log_unusable" not in events(caplog)
    assert "resumed_from_log" in events(caplog)


def test_a_number_that_returns_is_no_longer_a_former_one(tmp_path: Path) -> None:
    shard_count = ShardCountFile(2, tmp_path)
    shard_count.change(3)
    shard_count.change(2)
    shard_count.change(2)

    assert (shard_count.shards, shard_count.past, shard_count.changes) == (2, {3}, 2)
    assert ShardCountFile(3, tmp_path).shards == 2


def test_a_job_without_former_numbers_removes_them(tmp_path: Path) -> None:
    ShardCountFile(2, tmp_path).change(3)
    ShardCountFile(2, tmp_path).forget()

    assert ShardCountFile(2, tmp_path).shards == 2


def test_a_promoted_standby_writes_the_numbers_of_its_primary(tmp_path: Path) -> None:
    before = ShardCountFile(2, None)
    before.change(3)

    shard_count = ShardCountFile(2, tmp_path)
    shard_count.take_over(before.stored_values, 1)

    for found in (shard_count, ShardCountFile(2, tmp_path), ShardCountFile(3, tmp_path)):
        assert (found.shards, found.past, found.changes) == (1, {2, 3}, 2)


def test_the_coordinator_records_a_reshard_before_its_shard_applies_it() -> None:
    """A primary that dies at once has sent its standby the decision without the entry that
    follows.
    """
    standby_state = SimpleNamespace(
        hello=SimpleNamespace(
            facts=SimpleNamespace(shard_count=ShardCountFile(3, None).stored_values)
        ),
        shard_state=SimpleNamespace(shards=3),
        coordinator=SimpleNamespace(job=SimpleNamespace(shards=1)),
    )
    config = ServerConfig(shard=0, shards=3)

    shard_count = read_shard_count(config, cast(Any, SimpleNamespace(standby_state=standby_state)))

    assert (shard_count.shards, shard_count.past, shard_count.changes) == (1, {3}, 1)


def test_a_promoted_standby_that_cannot_write_the_file_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shard_count = ShardCountFile(2, tmp_path / "gone")
    shard_count.take_over({"shards": 3, "past": [2], "changes": 1}, 3)

    assert (shard_count.shards, shard_count.past, shard_count.changes) == (3, {2}, 1)
    assert "shard_count_not_stored" in events(caplog)


def test_without_a_data_directory_the_number_ends_with_the_process() -> None:
    shard_count = ShardCountFile(2, None)
    shard_count.change(3)

    assert (shard_count.shards, ShardCountFile(2, None).shards) == (3, 2)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", json.dumps({"shards": "x", "past": [], "changes": 0})]
)
def test_an_invalid_file_is_reported(tmp_path: Path, text: str) -> None:
    (tmp_path / "layout").write_text(text)

    with pytest.raises(SnapshotError, match="layout cannot be read"):
        ShardCountFile(2, tmp_path)
