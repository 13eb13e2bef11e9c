"""The texts of psserver's errors: WHAT failed: WHY. Try: HOW.

Other tests assert reasons, exit codes and the names of flags. A changed text changes this file.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pscommon.core.errors import PSError
from pscommon.settings.values import SnapshotEvery
from psproto.v1 import standby_pb2
from psserver.core.shard.primary_lease import PrimaryRecord
from psserver.process.config import ServerConfig
from psserver.process.identity import ServerIdentity
from psserver.process.job_id_file import JobIdFile
from psserver.process.shard_count_file import ShardCountFile
from psserver.replication.lease_directory import LeaseDirectory, begin_primary, lease_of
from psserver.replication.servicer import make_standby_check, not_primary
from psserver.shard.memory_budget import MemoryBudget
from psserver.waiting import ThreadWaiter, run

MAX_CHARACTERS = 200
DETAIL_CHARACTERS = {"standby in sync": 150, "other job": 20}


def config(**settings: Any) -> Callable[[Path], object]:
    """Return a call of ServerConfig."""
    return lambda folder: ServerConfig(**settings)


def full_budget(folder: Path) -> None:
    budget = MemoryBudget(10)
    run(budget.take(1, 6, 0.0, ThreadWaiter()))
    run(budget.take(1, 5, 0.0, ThreadWaiter()))


def standby_in_sync(folder: Path) -> None:
    server = ServerConfig(failover_lock=folder, bind="127.0.0.1:1")
    lease = LeaseDirectory(folder, 0)
    lease.swap(None, PrimaryRecord(1, "127.0.0.1:1", in_sync="standby"))
    begin_primary(server, lease_of(server), "127.0.0.1:1")


def other_job(folder: Path) -> None:
    (folder / "job").write_text("otter")
    JobIdFile(folder).check("stoat")


def unreadable_shard_count(folder: Path) -> None:
    (folder / "layout").write_text("{}")
    ShardCountFile(2, folder)


def standby_of(shard: int, shards: int) -> None:
    check = make_standby_check(ServerIdentity(0, 1, "here:1", job="otter"))
    check(standby_pb2.ReplicateRequest(shard=shard, shards=shards))


def raise_not_primary(folder: Path) -> None:
    raise not_primary("host:1")


FAILURES: dict[str, Callable[[Path], object]] = {
    # flags
    "shard": config(shard=2, shards=2),
    "default port": config(shard=20000, shards=20001),
    "number": config(min_workers=0),
    "seconds": config(lease=0.0),
    "interfaces": config(bind="0.0.0.0:1"),
    "port file": config(port_file=Path("/missing/port")),
    "log": config(durability="log"),
    "snapshots": config(snapshot_every=SnapshotEvery(steps=1)),
    "resume": config(resume=3),
    "backup workers": config(policy="async", backup_workers=1),
    "global batch": config(policy="async", global_batch=8),
    "round": config(global_batch=8, backup_workers=1),
    # memory
    "in flight": lambda folder: run(MemoryBudget(10).take(1, 11, 0.0, ThreadWaiter())),
    "in flight now": full_budget,
    # job and shards
    "other job": other_job,
    "shard count": unreadable_shard_count,
    "not ready": lambda folder: ServerIdentity(1, 2, "here:1").check_job("otter"),
    "job": lambda folder: ServerIdentity(0, 1, "here:1", job="otter").check_job("stoat"),
    # standby
    "standby in sync": standby_in_sync,
    "standby of another shard": lambda folder: standby_of(1, 2),
    "not primary": raise_not_primary,
}
TEXTS = {
    "shard": "--shard 2/2 is not valid: shards are counted from 0. Try: I/N with I less than N",
    "default port": (
        "--shard 20000/20001 has no default port: the last port is 65535. Try: `--bind HOST:PORT`"
    ),
    "number": "--min-workers 0 is not valid. Try: at least 1",
    "seconds": "--lease 0.0 is not valid. Try: more than 0 seconds",
    "interfaces": (
        "--bind 0.0.0.0:1 listens on all interfaces: other processes need one address. Try: "
        "`--advertise HOST:PORT`"
    ),
    "port file": (
        "--port-file /missing/port cannot be written: the folder /missing does not exist. Try: "
        "create it"
    ),
    "log": "--durability log needs a directory for the log. Try: `--data-dir DIR`",
    "snapshots": ("--snapshot-every 1steps needs a directory for snapshots. Try: `--data-dir DIR`"),
    "resume": "--resume 3 needs the directory of the snapshots. Try: `--data-dir DIR`",
    "backup workers": (
        "--backup-workers 1 excludes `--policy async`, which waits for no worker. Try: "
        "`--policy sync`"
    ),
    "global batch": (
        "--global-batch 8 excludes `--policy async`, which has no rounds. Try: `--policy sync`"
    ),
    "round": (
        "--global-batch excludes --backup-workers: it needs all gradients of a round. Try: "
        "leave out one of them"
    ),
    "in flight": (
        "11 bytes do not fit the server's --in-flight of 10. Try: a larger `--in-flight`, or "
        "more shards"
    ),
    "in flight now": "6 of 10 bytes are in flight, no room for 5 more (--in-flight)",
    "other job": (
        "data directory DIR belongs to job otter, not stoat. Try: `--job otter`, another "
        "`--data-dir`, or `--resume never` to start over (existing snapshots are moved aside)"
    ),
    "shard count": (
        "DIR/layout cannot be read: the number of servers is unknown: 'shards'. Try: `rm "
        "DIR/layout`, and start as many servers as the newest snapshot has parts"
    ),
    "not ready": "shard 1 is not connected to the coordinator yet",
    "job": "this server's job is otter, not stoat",
    "standby in sync": (
        "cannot start as primary of shard 0: its standby was in sync and may have taken over. "
        "Try: start this server with `--standby-of HOST:PORT` of the standby; if the standby is"
        " permanently lost: `touch DIR/shard-0/standby-is-gone`; if it belongs to another job: "
        "give each job its own `--failover-lock`"
    ),
    "standby of another shard": "a standby of shard 1/2 cannot follow shard 0/1",
    "not primary": "this server is a standby; its primary is host:1",
}


def text_of(name: str, folder: Path) -> str:
    with pytest.raises(PSError) as caught:
        FAILURES[name](folder)
    return str(caught.value).replace(str(folder), "DIR")


@pytest.mark.parametrize("name", FAILURES)
def test_text(name: str, tmp_path: Path) -> None:
    assert text_of(name, tmp_path) == TEXTS[name]


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_has_at_most_one_remedy_and_is_short(name: str) -> None:
    text = TEXTS[name]

    assert text.count(". Try: ") <= 1
    assert len(text) <= MAX_CHARACTERS + DETAIL_CHARACTERS.get(name, 0)
    assert not text.endswith(".")
