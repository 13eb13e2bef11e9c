"""When a failover makes all shards roll back."""

import pytest

from pscommon.core.log_entries import Cut, ShardReport
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.job.policy import policy
from psserver.core.job.settings import JobRules
from psserver.core.servers.catch_up import promotion_needs_rollback


@pytest.mark.parametrize(
    ("newest_version", "shard_index", "expected"),
    [(0, 0, False), (0, 1, False), (1, 1, True), (0, 2, True)],
    ids=["shard behind", "same index", "newer snapshot", "shard ahead"],
)
def test_a_promotion_rolls_back_if_others_may_have_more(
    newest_version: int, shard_index: int, expected: bool
) -> None:
    coordinator = CoordinatorMachine(1, JobRules(policy("sync"), 1), generation=0, log_id=5)
    coordinator.log.append(Cut(1, 0))
    digest = coordinator.log.digest if shard_index else 0
    report = ShardReport(0, 5, shard_index, (), digest=digest)

    assert promotion_needs_rollback(coordinator, report, newest_version) is expected
