"""The three policies, decision by decision, in the form that searches.

test_rounds_reference.py compares the coordinator with it.
"""

import itertools

import pytest

from pscommon.core.errors import InvalidRequestError
from pscommon.core.log_entries import PushKey
from psserver.core.job.policy import Policy, policy
from tests.support.searching_machine import choose, within_bound

SYNC, ASYNC, SSP = policy("sync"), policy("async"), policy("ssp", 2)


def ready(*workers: int) -> dict[int, PushKey]:
    return {worker: PushKey(worker, 1) for worker in workers}


def chosen(job_policy: Policy, clocks: dict[int, int], *workers: int) -> list[int]:
    return [key.worker for key in choose(job_policy, clocks, ready(*workers))]


def test_each_policy_has_its_rules() -> None:
    assert policy("sync") == Policy("sync", 0, barrier=True)
    assert policy("async") == Policy("async", None, barrier=False)
    assert policy("ssp", 2) == Policy("ssp", 2, barrier=False)
    assert policy("ssp", 0) == Policy("ssp", 0, barrier=True)
    assert policy("async", max_staleness=4).max_staleness == 4


@pytest.mark.parametrize(
    ("name", "staleness", "named"),
    [
        ("ssp", None, "needs a bound"),
        ("sync", 1, "--staleness 1"),
        ("async", 0, "--staleness 0"),
        ("ssp", -1, "--staleness -1"),
        ("hogwild", None, "'hogwild'"),
    ],
)
def test_incompatible_settings_are_refused(name: str, staleness: int | None, named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        policy(name, staleness)


def test_sync_takes_all_pushes_or_none_in_worker_order() -> None:
    clocks = {2: 5, 1: 5, 3: 5}

    assert chosen(SYNC, clocks, 3, 1) == []
    assert chosen(SYNC, clocks, 3, 1, 2) == [2, 1, 3]
    assert chosen(SYNC, {}) == []


def test_async_takes_the_first_push_that_arrived() -> None:
    assert chosen(ASYNC, {1: 0, 2: 99}, 2, 1) == [2]
    assert chosen(ASYNC, {1: 0, 2: 99}) == []


def test_ssp_skips_workers_beyond_the_bound() -> None:
    assert chosen(SSP, {1: 0, 2: 2, 3: 1}, 2, 3) == [3]
    assert chosen(SSP, {1: 0, 2: 2, 3: 2}, 2, 3) == []
    assert chosen(SSP, {1: 1, 2: 2}, 2) == [2]
    assert chosen(SSP, {2: 7}, 2) == [2]


@pytest.mark.parametrize("bound", [1, 2, 3])
def test_the_ssp_bound_matches_its_definition_for_all_small_clocks(bound: int) -> None:
    """After the push, no clock is more than the bound above the smallest. A worker may always equal
    the slowest one.
    """
    job_policy = policy("ssp", bound)
    for clocks in itertools.product(range(6), repeat=3):
        after = [clocks[0] + 1, *clocks[1:]]

        assert within_bound(job_policy, dict(enumerate(clocks)), 0) == (
            after[0] - min(after) <= bound
        )
