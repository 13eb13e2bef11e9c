"""The connection between a standby and its primary is silent; both run and reach the failover
lock.
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
from tests.support.pushes_over_failover import (
    FLAGS,
    POLICIES,
    start_in_sync,
    stop_and_check,
    wait_for_pushes,
)
from tests.support.standby_job import StandbyJob
from tests.support.standbys import RunningStandby
from tests.support.worker_scripts import count as push_ones
from tests.support.workers import count, counter, until

pytestmark = pytest.mark.timing

Make = Callable[..., Cluster]
DELAY_SECONDS = 0.7
"""Seconds by which one direction is silent before the other."""


def test_a_primary_continues_without_a_silent_standby(
    cluster: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pushes wait at most the standby timeout. The standby knows that its state is out of date.

    After the fault it loads the state and is in sync.
    """
    # otherwise the lock gives it an address without the proxy
    monkeypatch.setattr(Standby, "_find_primary", lambda standby: None)
    server = cluster(policy="async", failover_lock=tmp_path).servers[0]
    lease = LeaseDirectory(tmp_path, 0)
    with (
        Proxy(server.address) as proxy,
        RunningStandby(server, standby_of=proxy.address) as following,
    ):
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
            standby_state = following.standby._standby_state
            assert standby_state is not None
            until(lambda: standby_state.version == 12 == server.engine.live.version, "all updates")
    assert not following.standby._promoted
    assert not server.ended.is_set()


def serve_behind_proxy(arguments: Sequence[str], log: Path) -> None:
    """Run a server; a standby does not use the address that the failover lock gives."""
    Standby._find_primary = lambda standby: None  # type: ignore[method-assign]
    serve(arguments, log)


class ProxiedStandbyJob(StandbyJob):
    """A job whose standby follows through the proxy `line`; workers reach both servers directly."""

    body = staticmethod(serve_behind_proxy)

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
def test_a_cut_standby_connection_leaves_one_primary_without_lost_pushes(
    tmp_path: Path, policy: str, shard: int, first: Direction | None, winner: str
) -> None:
    """Both directions are silent; the server that detects it first becomes or stays primary. The
    other one exits or never takes over.
    """
    with ProxiedStandbyJob(tmp_path, 2, (*POLICIES[policy], *FLAGS), shard, pushes=10**6) as job:
        start_in_sync(job, shard)
        lease = LeaseDirectory(tmp_path / "lock", shard)
        since = time.monotonic()
        job.line.half_open(first)
        if first is not None:
            threading.Event().wait(DELAY_SECONDS)
            job.line.half_open()
        print(f"{winner}: workers go on after {wait_for_pushes(job, since):.1f} s")

        tenure = lease.read()
        assert tenure is not None
        primary, standby = job.processes[f"s{shard}"], job.processes[f"b{shard}"]
        actual_winner = "standby" if tenure.holder == job.standby(shard) else "primary"
        assert winner in ("either", actual_winner), job.all_logs()
        if actual_winner == "standby":
            until(lambda: primary.exit_code == ExitCode.TAKEN, "the end of the old primary")
        else:
            until(
                lambda: "failover_refused" in standby.log.read_text(),
                "the refusal of the failover",
            )
        job.line.heal()
        if actual_winner == "primary":
            until(lambda: job.in_sync(shard), "in sync again")
        wait_for_pushes(job, time.monotonic())
        assert standby.exit_code is None
        stop_and_check(job, policy)
