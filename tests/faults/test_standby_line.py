"""The line between a standby and its primary goes quiet, while both live and the failover lock
can be reached.
"""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from pscommon.core.exit_codes import ExitCode
from psserver.core.shard.replication import STANDBY_TIMEOUT_SECONDS
from psserver.replication.lease_directory import LeaseDirectory
from psserver.replication.standby import Standby
from tests.support.cluster import Cluster
from tests.support.forked_job import serve
from tests.support.machine_time import machine_seconds
from tests.support.proxy import Proxy
from tests.support.proxy_line import Direction
from tests.support.pushes_over_failover import FLAGS, POLICIES, finish, goes_on, running
from tests.support.standby_job import StandbyJob
from tests.support.standbys import Following
from tests.support.worker_scripts import count as push_ones
from tests.support.workers import count, counter, until

pytestmark = pytest.mark.timing

Make = Callable[..., Cluster]
SOONER = 0.7
"""Seconds by which one end hears nothing before the other does."""


def test_the_primary_goes_on_alone_and_the_standby_never_takes_over(
    cluster: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for longer than the silence that is allowed; what a cut-off standby has is
    old, and it knows that.

    Healed, it loads anew and is in sync.
    """
    # else the lock leads it past the line
    monkeypatch.setattr(Standby, "_find_primary", lambda standby: None)
    server = cluster(policy="async", failover_lock=tmp_path).servers[0]
    lease = LeaseDirectory(tmp_path, 0)
    with Proxy(server.address) as proxy, Following(server, standby_of=proxy.address) as following:
        following.in_sync()
        with counter(server.address) as client:
            count(client, 3)
            proxy.half_open("up")
            began = time.monotonic()
            count(client, 3)
            assert machine_seconds(began) < STANDBY_TIMEOUT_SECONDS + 1.5

            until(
                lambda: not following.standby._failover.has_state,
                "the standby to know that it is behind",
            )
            tenure = lease.read()
            assert tenure is not None
            assert (tenure.term, tenure.holder, tenure.in_sync) == (1, server.address, "")
            count(client, 3)

            proxy.heal()
            following.in_sync()
            count(client, 3)
            mirror = following.standby._standby_state
            assert mirror is not None
            until(lambda: mirror.version == 12 == server.engine.live.version, "all updates")
    assert not following.standby._promoted
    assert not server.ended.is_set()


def serve_at_the_line(arguments: Sequence[str], log: Path) -> None:
    """Body of a server's process: a standby does not leave its line for the address that the
    lock gives.
    """
    Standby._find_primary = lambda standby: None  # type: ignore[method-assign]
    serve(arguments, log)


class LineJob(StandbyJob):
    """Its one standby follows through `line`; whoever pushes reaches both of them without it."""

    body = staticmethod(serve_at_the_line)

    def __init__(
        self, folder: Path, shards: int, flags: tuple[object, ...], shard: int, **options: Any
    ) -> None:
        super().__init__(folder, shards, flags, push_ones, **options)
        self.line = Proxy(self._binds[shard])

    def __enter__(self) -> Self:
        self.line.__enter__()
        return super().__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        self.line.__exit__(kind, error, trace)

    def _standby(self, shard: int) -> list[str]:
        return [
            self.line.address if word == self._binds[shard] else word
            for word in super()._standby(shard)
        ]


@pytest.mark.parametrize(
    ("policy", "shard", "first", "winner"),
    [("async", 1, "down", "standby"), ("sync", 0, "up", "primary"), ("sync", 0, None, "either")],
)
def test_one_of_them_is_primary_and_what_was_acknowledged_counts(
    tmp_path: Path, policy: str, shard: int, first: Direction | None, winner: str
) -> None:
    """Quiet both ways: who finds that out first. The other one is not primary any more, or never
    will be.
    """
    with LineJob(tmp_path, 2, (*POLICIES[policy], *FLAGS), shard, pushes=10**6) as job:
        running(job, shard)
        lease = LeaseDirectory(tmp_path / "lock", shard)
        since = time.monotonic()
        job.line.half_open(first)
        if first is not None:
            threading.Event().wait(SOONER)
            job.line.half_open()
        print(f"{winner}: workers go on after {goes_on(job, since):.1f} s")

        tenure = lease.read()
        assert tenure is not None
        primary, standby = job.lives[f"s{shard}"], job.lives[f"b{shard}"]
        won = "standby" if tenure.holder == job.standby(shard) else "primary"
        assert winner in ("either", won), job.said()
        if won == "standby":
            until(lambda: primary.ended == ExitCode.TAKEN, "the end of the old primary")
        else:
            until(
                lambda: "failover_refused" in standby.log.read_text(),
                "the standby to know",
            )
        job.line.heal()
        if won == "primary":
            until(lambda: job.in_sync(shard), "in sync again")
        goes_on(job, time.monotonic())
        assert standby.ended is None
        finish(job, policy)
