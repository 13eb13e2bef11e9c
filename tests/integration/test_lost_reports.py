"""Reports of a shard that the coordinator cannot use when they come."""

from collections.abc import Callable

import pytest

from pscommon.core.log_entries import ShardReport
from psworker import OptimizerSpec
from tests.support.cluster import Cluster
from tests.support.stream_training import ONES, START
from tests.support.workers import connected

Make = Callable[..., Cluster]


@pytest.mark.parametrize("shard", [0, 1])
def test_a_push_in_an_unused_report_is_reported_again(
    cluster: Make, monkeypatch: pytest.MonkeyPatch, shard: int
) -> None:
    """During a reshard, a push that cannot count yet has no effect on the coordinator."""
    servers = cluster(2, policy="async")
    with connected(servers.address) as client:
        client.register(START, OptimizerSpec("sgd", lr=1.0))
        engine = servers.servers[shard].engine
        report, lost = engine.coordinator.request_report, list[ShardReport]()

        def lose_one() -> None:
            if engine.live.machine.staged and not lost:
                lost.append(engine.make_report(only_new=True))
            else:
                report()

        monkeypatch.setattr(engine.coordinator, "request_report", lose_one)
        assert client.push_pull(ONES).status == "applied"
        assert lost
