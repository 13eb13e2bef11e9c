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
    """As ForkedJob; "b1" is the standby of shard 1's first primary, "s1". lock: with a lock for
    failover.

    Nothing is written to any disk, so what survives does so in the standbys' memory. monitors:
    theirs, by shard.
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
        # "s1" is started as the standby of "b1", which took its place
        self.followed: set[int] = set()
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
        joined += ["--standby-of", self._standbys[shard]] if shard in self.followed else []
        return [
            "--shard",
            f"{shard}/{self._of[shard]}",
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

    def found(self, address: str) -> dict[str, Any]:
        """What ps-ctl status shows; empty where nobody answers, or who does is a standby."""
        try:
            with CoordinatorClient([address], 2.0) as servers:
                return servers.status()
        except PSError:
            return {}

    def servers(self) -> list[dict[str, Any]]:
        """As ps-ctl status shows them."""
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
