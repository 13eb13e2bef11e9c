"""A script that makes no call is distinguished from one that waits for others inside a call."""

from collections.abc import Iterator

import numpy as np
import pytest

from pscommon.core.model_spec import OptimizerSettings
from psworker.client.client import Client
from psworker.core.clock import MAX_COUNTED_SECONDS, CallActivity
from psworker.core.results import StepProgress
from tests.support.fake_server import FakeCluster

SGD = OptimizerSettings("sgd", ({"lr": 0.5},))
ONES = {"w": np.ones(50, np.float32)}


def test_seconds_without_a_call_grow_until_the_next_call() -> None:
    activity = CallActivity(100.0)

    assert [activity.beat(now, 0, False) for now in (101.0, 102.0, 103.5)] == [1.0, 2.0, 3.5]
    assert activity.beat(104.0, 1, False) == 0.0
    assert activity.beat(105.0, 1, False) == 1.0


def test_a_wait_inside_a_call_does_not_count() -> None:
    activity = CallActivity(0.0)

    assert [activity.beat(now, 0, waits=True) for now in (1.0, 2.0)] == [0.0, 0.0]
    assert activity.beat(3.0, 0, waits=False) == 1.0


def test_a_suspension_of_the_whole_process_does_not_count() -> None:
    activity = CallActivity(0.0)

    assert activity.beat(500.0, 0, False) == MAX_COUNTED_SECONDS


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(lease=0.1) as cluster:
        yield cluster


def grows(cluster: FakeCluster) -> bool:
    """Return whether the last three heartbeats report ever more seconds without a call."""
    first, second, third = (beat.no_call_seconds for beat in cluster.beats[-3:])
    return 0.0 < first < second < third


def test_heartbeats_carry_the_seconds_without_a_call(cluster: FakeCluster) -> None:
    with Client(cluster.addresses) as client:
        cluster.wait_until(lambda: len(cluster.beats) >= 3 and grows(cluster))

        for call in (
            lambda: client.show_progress(StepProgress(1, 0.1, 1.0, "compute")),
            lambda: client.report_soon({"loss": 0.5}),
        ):
            cluster.wait_until(lambda: grows(cluster))
            seen = len(cluster.beats)
            call()
            cluster.wait_until(
                lambda seen=seen: any(beat.no_call_seconds == 0.0 for beat in cluster.beats[seen:])
            )


def test_heartbeats_of_a_waiting_push_carry_no_seconds(cluster: FakeCluster) -> None:
    cluster.waits_for = "worker 9"
    with Client(cluster.addresses, connect_timeout=20.0, wait_timeout=1.0) as client:
        client.register(ONES, SGD)
        seen = len(cluster.beats)
        with pytest.raises(Exception, match="worker 9"):
            client.push(ONES)

        waiting = cluster.beats[seen + 1 :]

    assert len(waiting) > 10
    assert sum(beat.no_call_seconds for beat in waiting) < 0.2
