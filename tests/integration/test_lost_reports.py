"""Reports of a shard that the coordinator cannot use when they come."""

from collections.abc import Callable

import pytest

from psworker import OptimizerSpec
from tests.support.cluster import Cluster
from tests.support.stream_training import ONES, START
from tests.support.workers import connected

Make = Callable[..., Cluster]


@pytest.mark.parametrize("shard", [0, 1])
def test_a_push_in_an_unused_report_is_reported_again(cluster: Make, shard: int) -> None:
    """During a reshard, a push that cannot count yet has no effect on the coordinator."""
    servers = cluster(2, policy="async")
    with connected(servers.address) as client:
        client.register(START, OptimizerSpec("sgd", lr=1.0))
        engine = servers.servers[shard].engine
        report = engine.request_report

        def lose_one() -> None:
            if engine.live.machine.staged:
                engine.request_report = report
                engine.make_report(only_new=True)
            else:
                report()

        engine.request_report = lose_one
        assert client.push_pull(ONES).status == "applied"
        assert engine.request_report is report
