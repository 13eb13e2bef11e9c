"""Server processes killed at things that they do on their disks, once and again: what was
acknowledged is there.

Operations are sampled here; each single one is walked, without processes, in
test_every_operation.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from pscommon.core.errors import PSError
from pscommon.snapshot import SnapshotDirectory
from tests.support.crashing_servers import KILLED, CrashingServers
from tests.support.forked_job import Life
from tests.support.workers import ONES, count, counted, counter, until, weights_of

FLAGS = ("--lease", "20s", "--snapshot-every", "2steps")
LOGGED = (*FLAGS, "--durability", "log", "--log-fsync", "always")
PUSHES = 5

# operations of a server in such a job, evenly sampled: shard 0 also keeps the job's log and the
# manifests
FIRST = {0: range(1, 130, 50), 1: range(1, 70, 30)}
SNAPSHOT_ONLY = {0: range(2, 30, 10), 1: range(2, 16, 8)}


def work(address: str) -> None:
    """Five pushes, each of which counts, whoever dies meanwhile."""
    with counter(address, connect_timeout=30.0) as client:
        for _ in range(PUSHES):
            assert client.push(ONES).status in ("applied", "duplicate")
        assert counted(client.pull()) == PUSHES


def work_until_it_dies(address: str, server: Life) -> None:
    """Pushes; on a busy machine the servers may be late."""
    while server.ended is None:
        with suppress(PSError), counter(address, connect_timeout=1.0) as client:
            count(client, PUSHES)


def each(
    folder: Path, samples: range, walk: Callable[[CrashingServers, int], None], *flags: object
) -> None:
    """The walk at each sample, with servers of its own; what they said comes with a failure."""
    for at in samples:
        (folder / str(at)).mkdir()
        with CrashingServers(folder / str(at), *flags) as servers:
            try:
                walk(servers, at)
            except BaseException as error:
                error.add_note(f"killed at operation {at}\n{servers.said()}")
                raise


@pytest.mark.parametrize("shard", FIRST)
def test_with_a_log_every_push_counts_once(tmp_path: Path, shard: int) -> None:
    """The server dies, its successor does while it reads the log or soon after; in the end both
    die.
    """

    def walk(servers: CrashingServers, at: int) -> None:
        servers.start(1 - shard)
        first = servers.start(shard, at)
        with ThreadPoolExecutor(1) as pool:
            working = pool.submit(work, servers.address)
            until(lambda: first.ended is not None, f"the end of shard {shard}")
            assert first.ended == KILLED
            second = servers.start(shard, at=at * 7 % 23 + 1)
            until(lambda: second.ended is not None or working.done(), "a second end")
            if second.ended is not None:
                servers.start(shard)
            working.result(60)
        servers.kill()
        servers.start(0)
        servers.start(1)
        assert counted(weights_of(servers.address)) == PUSHES

    each(tmp_path, FIRST[shard], walk, *LOGGED)


@pytest.mark.parametrize("shard", SNAPSHOT_ONLY)
def test_without_one_all_shards_return_to_the_newest_snapshot(tmp_path: Path, shard: int) -> None:
    def walk(servers: CrashingServers, at: int) -> None:
        servers.start(1 - shard)
        first = servers.start(shard, at)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(work_until_it_dies, servers.address, first)
            until(lambda: first.ended is not None, f"the end of shard {shard}")
            servers.kill()
        manifest, skipped = SnapshotDirectory(servers.folder / "data").newest_valid()
        assert skipped == ()
        servers.start(0)
        servers.start(1)
        with counter(servers.address) as client:
            assert counted(client.pull()) == (manifest.version if manifest else 0)
            count(client)

    each(tmp_path, SNAPSHOT_ONLY[shard], walk, *FLAGS)
