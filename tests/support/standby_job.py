"""A job of real processes whose servers have standbys."""

import time
from pathlib import Path
from typing import Any

from pscommon.core.errors import PSError
from psworker.ctl.job_client import CoordinatorClient
from tests.support.forked_job import ForkedJob, Script
from tests.support.ports import free_ports
from tests.support.workers import connected


class StandbyJob(ForkedJob):
    """A ForkedJob with standbys: "b1" follows "s1", the first primary of shard 1.

    lock: configure a failover lock.
    monitors: monitoring addresses of the standbys, by shard.
    replaced: shards whose "s" process restarts as standby of "b".

    Without a data directory only the memory of standbys survives a crash.
    """

    def __init__(
        self,
        folder: Path,
        shards: int,
        flags: tuple[object, ...],
        script: Script,
        lock: bool = True,
        **options: Any,
    ) -> None:
        locked = ("--failover-lock", folder / "lock") if lock else ()
        super().__init__(folder, shards, (*flags, *locked), script, **options)
        self.replaced: set[int] = set()
        ports = free_ports(2 * shards)
        self._standbys = [f"127.0.0.1:{port}" for port in ports[:shards]]
        self.monitors = [f"127.0.0.1:{port}" for port in ports[shards:]]

    @property
    def address(self) -> str:
        return ",".join((*self._binds, *self._standbys))

    def standby(self, shard: int) -> str:
        return self._standbys[shard]

    def _server(self, shard: int) -> list[str]:
        joined = ["--join", self._binds[0]] if shard else []
        joined += ["--standby-of", self._standbys[shard]] if shard in self.replaced else []
        return [
            "--shard",
            f"{shard}/{self._shard_counts[shard]}",
            "--bind",
            self._binds[shard],
            *joined,
            *self._flags,
        ]

    def _standby(self, shard: int) -> list[str]:
        place = ["--shard", f"{shard}/{self._shards}", "--bind", self._standbys[shard]]
        return [
            *place,
            "--standby-of",
            self._binds[shard],
            "--metrics-bind",
            self.monitors[shard],
            *self._flags,
        ]

    def status_from(self, address: str) -> dict[str, Any]:
        """Return the status that this address gives; empty if it does not answer or is a
        standby.
        """
        try:
            with CoordinatorClient([address], 2.0) as servers:
                return servers.status()
        except PSError:
            return {}

    def servers(self) -> list[dict[str, Any]]:
        """Return the rows of the servers in the status."""
        with connected(self.address, observe=True) as client:
            rows: list[dict[str, Any]] = client.status()["servers"]
            return rows

    def in_sync(self, *shards: int) -> bool:
        rows = self.servers()
        return all(rows[shard].get("standby_state") == "in sync" for shard in shards)


def longest_pause(times: list[float], since: float) -> float:
    """Seconds between two pushes that counted, after a moment."""
    after = [t for t in times if t >= since]
    before = max(t for t in times if t <= since)
    pauses = [b - a for a, b in zip([before, *after], after, strict=False)]
    return max(pauses, default=time.monotonic() - since)
