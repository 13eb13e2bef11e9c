"""The line from a standby to its primary goes quiet, while both live and the failover lock can be reached.

Where it is quiet the other way, or both ways, either of them may win: that needs processes that may die, and the
simulation (tests/sim/succession.py) has them.
"""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from psserver.core.shipping import SILENCE
from psserver.primary_lease import FolderLease
from psserver.standby import Standby
from tests.e2e.conftest import Cluster
from tests.e2e.standbys import Following
from tests.e2e.workers import count, counter, until
from tests.faults.proxy import Proxy

Make = Callable[..., Cluster]


def test_the_primary_goes_on_alone_and_the_standby_never_takes_over(
    cluster: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for longer than the silence that is allowed; what a cut-off standby has is old, and it knows that.

    Healed, it loads anew and is in sync.
    """
    monkeypatch.setattr(Standby, "_find", lambda standby: None)  # else the lock leads it past the line
    server = cluster(policy="async", failover_lock=tmp_path).servers[0]
    lease = FolderLease(tmp_path, 0)
    with Proxy(server.address) as proxy, Following(server, standby_of=proxy.address) as following:
        following.in_sync()
        with counter(server.address) as client:
            count(client, 3)
            proxy.half_open("up")
            began = time.monotonic()
            count(client, 3)
            assert time.monotonic() - began < SILENCE + 1.5

            until(lambda: not following.standby._succession.loaded, "the standby to know that it is behind")
            tenure = lease.read()
            assert tenure is not None
            assert (tenure.term, tenure.holder, tenure.in_sync) == (1, server.address, "")
            count(client, 3)

            proxy.heal()
            following.in_sync()
            count(client, 3)
            mirror = following.standby._mirror
            assert mirror is not None
            until(lambda: mirror.version == 12 == server.engine.version, "all updates")
    assert not following.standby._promoted
    assert not server.ended.is_set()
