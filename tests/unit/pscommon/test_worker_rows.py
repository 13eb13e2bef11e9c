"""The order of the workers on the live page and in ps-ctl top."""

from typing import Any

from pscommon.telemetry.worker_rows import slowest_first


def worker(number: int, **values: Any) -> dict[str, Any]:
    usual = {"silent_seconds": 0.1, "health": "live", "own_seconds": None, "step_seconds": 0.0}
    return {"worker": number, **usual, **values}


def test_workers_with_a_problem_come_first_then_the_slowest() -> None:
    found = slowest_first(
        [
            worker(1, own_seconds=0.1),
            worker(2, own_seconds=0.3),
            worker(3, silent_seconds=None, health="lost", own_seconds=9.0),
            worker(4, health="silent", own_seconds=0.01),
            worker(5, step_seconds=0.2),
            worker(6, silent_seconds=None, health="left"),
        ]
    )

    assert [row["worker"] for row in found] == [4, 2, 5, 1, 3, 6]


def test_a_row_of_an_older_server_has_fewer_values() -> None:
    assert slowest_first([{"worker": 1}, {}]) == [{"worker": 1}, {}]
