"""Servers killed at disk operations recover every acknowledged push.

Operations are sampled here. test_every_operation covers each one without processes.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from pscommon.core.errors import PSError
from pscommon.snapshot import SnapshotDirectory
from tests.support.crashing_servers import KILLED, CrashingServers
from tests.support.forked_job import JobProcess
from tests.support.workers import ONES, count, counted, counter, until, weights_of

FLAGS = ("--lease", "20s", "--snapshot-every", "2steps")
LOGGED = (*FLAGS, "--durability", "log", "--log-fsync", "always")
PUSHES = 5

# sampled disk operations of a server; shard 0 also writes the job's log and the manifests
FIRST = {0: range(1, 130, 50), 1: range(1, 70, 30)}
SNAPSHOT_ONLY = {0: range(2, 30, 10), 1: range(2, 16, 8)}


def push_across_crashes(address: str) -> None:
    """Push five times across server crashes; each push counts."""
    with counter(address, connect_timeout=30.0) as client:
        for _ in range(PUSHES):
            assert client.push(ONES).status in ("applied", "duplicate")
        assert counted(client.pull()) == PUSHES


def push_until_server_exits(address: str, server: JobProcess) -> None:
    """Push until the server exits; the servers may be slow to start."""
    while server.exit_code is None:
        with suppress(PSError), counter(address, connect_timeout=1.0) as client:
            count(client, PUSHES)


def for_each_operation(
    folder: Path, samples: range, crash_at: Callable[[CrashingServers, int], None], *flags: object
) -> None:
    """Call `walk` with new servers for each sampled operation; add their logs to a failure."""
    for at in samples:
        (folder / str(at)).mkdir()
        with CrashingServers(folder / str(at), *flags) as servers:
            try:
                crash_at(servers, at)
            except BaseException as error:
                error.add_note(f"killed at operation {at}\n{servers.all_logs()}")
                raise


@pytest.mark.parametrize("shard", FIRST)
def test_with_a_log_each_push_counts_once_across_disk_kills(tmp_path: Path, shard: int) -> None:
    """The server is killed, and its successor during or soon after recovery; finally both
    servers.
    """

    def crash_at(servers: CrashingServers, at: int) -> None:
        servers.start(1 - shard)
        first = servers.start(shard, at)
        with ThreadPoolExecutor(1) as pool:
            pushing = pool.submit(push_across_crashes, servers.address)
            until(lambda: first.exit_code is not None, f"the end of shard {shard}")
            assert first.exit_code == KILLED
            second = servers.start(shard, at=at * 7 % 23 + 1)
            until(lambda: second.exit_code is not None or pushing.done(), "the second crash")
            if second.exit_code is not None:
                servers.start(shard)
            pushing.result(60)
        servers.kill()
        servers.start(0)
        servers.start(1)
        assert counted(weights_of(servers.address)) == PUSHES

    for_each_operation(tmp_path, FIRST[shard], crash_at, *LOGGED)


@pytest.mark.parametrize("shard", SNAPSHOT_ONLY)
def test_without_a_log_all_shards_recover_the_newest_snapshot(tmp_path: Path, shard: int) -> None:
    def crash_at(servers: CrashingServers, at: int) -> None:
        servers.start(1 - shard)
        first = servers.start(shard, at)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(push_until_server_exits, servers.address, first)
            until(lambda: first.exit_code is not None, f"the end of shard {shard}")
            servers.kill()
        manifest, skipped = SnapshotDirectory(servers.folder / "data").newest_valid()
        assert skipped == ()
        servers.start(0)
        servers.start(1)
        with counter(servers.address) as client:
            assert counted(client.pull()) == (manifest.version if manifest else 0)
            count(client)

    for_each_operation(tmp_path, SNAPSHOT_ONLY[shard], crash_at, *FLAGS)
