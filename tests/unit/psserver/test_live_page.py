"""What the live page gets: curves, the order of the workers, and its address."""

import math
import time
from itertools import pairwise

import pytest

from pscommon.core.metric_row import MetricRow
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.job.policy import policy
from psserver.core.job.settings import JobRules
from psserver.monitoring.live_page import (
    MAX_CURVES_COUNT,
    MAX_POINTS_COUNT,
    curves,
    page_url,
)
from psserver.monitoring.pass_progress import MAX_SPEEDS_COUNT, SPEED_SECONDS, PassProgress


def rows(name: str, count: int) -> list[MetricRow]:
    return [MetricRow(1000.0 + at, at, 1, 0, name, at / 3) for at in range(count)]


def test_a_short_curve_has_all_values() -> None:
    shown = curves({"loss": rows("loss", 3)}, [])

    assert shown["reported"]["loss"] == {
        "times": [1000.0, 1001.0, 1002.0],
        "values": [0.0, 0.333333, 0.666667],
    }
    assert shown["samples_per_second"] == {"times": [], "values": []}


@pytest.mark.parametrize("names", [1, 7, 2000])
def test_curves_have_few_points_with_the_first_and_the_newest(names: int) -> None:
    reported = {f"value {number}": rows("", 900) for number in range(names)}
    shown = curves(reported, [(float(at), 1.0) for at in range(900)])

    found = [shown["samples_per_second"], *shown["reported"].values()]
    assert sum(len(curve["times"]) for curve in found) <= MAX_POINTS_COUNT
    assert {(curve["times"][0], curve["times"][-1]) for curve in found[1:]} == {(1000.0, 1899.0)}
    assert shown["omitted"] == max(0, names - MAX_CURVES_COUNT)


def test_the_loss_comes_first_and_other_names_follow() -> None:
    shown = curves({name: rows(name, 1) for name in ("b", "loss", "a")}, [])

    assert list(shown["reported"]) == ["loss", "a", "b"]


def test_values_that_are_not_finite_stay() -> None:
    """The document has null for them, and the page a gap."""
    row = MetricRow(1.0, 1, 1, 0, "loss", math.inf)

    assert curves({"loss": [row]}, [])["reported"]["loss"]["values"] == [math.inf]


def test_times_of_the_speed_are_those_of_the_wall_clock() -> None:
    times = curves({}, [(time.monotonic() - 5, 1.0)])["samples_per_second"]["times"]

    assert times == [pytest.approx(time.time() - 5, abs=1.0)]


def test_the_speed_of_a_long_job_has_few_values_over_its_whole_time() -> None:
    progress, coordinator = PassProgress(), CoordinatorMachine(1, JobRules(policy("async")))
    for tick in range(40_000):
        progress.update(coordinator, tick * 0.5)

    found = [at for at, _ in progress.speeds()]
    assert MAX_SPEEDS_COUNT // 2 <= len(found) <= MAX_SPEEDS_COUNT
    gaps = {after - before for before, after in pairwise(found)}
    assert found[0] == 0.0
    assert len(gaps) == 1
    assert gaps.pop() >= 64 * SPEED_SECONDS


@pytest.mark.parametrize(
    ("base", "url"),
    [
        ("http://127.0.0.1:9464", "http://127.0.0.1:9464/"),
        ("https://[::1]:1", "https://[::1]:1/"),
        ("http://0.0.0.0:9464", "http://server-0:9464/"),
        ("https://[::]:9464", "https://server-0:9464/"),
    ],
)
def test_the_address_of_the_page_is_reachable(base: str, url: str) -> None:
    """A port on all interfaces is reached by the name under which others know the server."""
    assert page_url(base, "server-0:50051") == url
