"""The operator's settings when servers restart with other ones; test_restart_settings uses
servers.
"""

import json
from dataclasses import replace

from pscommon.core.log_entries import Cut
from psserver.core.job.policy import policy
from psserver.core.job.settings import JobRules, WorkerLossMode
from psserver.core.job.snapshot_schedule import SnapshotInterval
from tests.support.coordinator_job import Job


def test_settings_survive_json() -> None:
    rules = JobRules(
        policy("ssp", 2, 5),
        3,
        7.0,
        SnapshotInterval(steps=9),
        WorkerLossMode("wait", 4.0),
        "clip",
        2.5,
        6,
        None,
        late="drop",
    )

    assert JobRules.from_json(json.loads(json.dumps(rules.as_json()))) == rules


def test_changed_settings_apply_after_the_restart() -> None:
    """A policy set by a command stays unless the flags name another one than before."""
    job = Job(workers=1)
    coordinator = job.coordinator
    coordinator.set_policy(policy("ssp", 2), job.now)

    coordinator.use_rules(
        replace(coordinator.job.rules, min_workers=3, lease=9.0, every=SnapshotInterval(steps=1)),
        job.now,
    )

    assert (coordinator.job.min_workers, coordinator.job.policy) == (3, policy("ssp", 2))
    assert coordinator.membership.leases.seconds_to_end(job.now) == 9.0
    job.push(job.add(), 1)
    assert isinstance(job.news()[-1], Cut)
    coordinator.use_rules(replace(coordinator.job.rules, policy=policy("async")), job.now)
    assert coordinator.job.policy == policy("async")
