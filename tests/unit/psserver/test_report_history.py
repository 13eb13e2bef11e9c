"""The history of reported values is bounded, of even density, and the same after a restart."""

import itertools
import json
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pscommon.core.limits import MAX_METRICS, MAX_NAME_CHARACTERS
from pscommon.core.metric_row import MetricRow
from psserver.core.commands.command import Command
from psserver.core.commands.data_commands import ReportValues
from psserver.core.commands.recorded import RecordedCommand
from psserver.core.commands.recorder import Recorder, replay
from psserver.core.commands.worker_commands import Join, Leave, Lose
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.job.policy import policy
from psserver.core.job.settings import JobRules
from psserver.core.workers.reported_values import (
    MAX_ROWS,
    MAX_THINNED_ROWS,
    ReportedValue,
    ReportHistory,
)


def row(
    time: float, value: float = 0.0, rank: int = 0, name: str = "loss", version: int | None = None
) -> MetricRow:
    return MetricRow(
        time, int(time * 10) if version is None else version, rank + 1, rank, name, value
    )


def filled(seconds: int, ranks: int = 1, names: tuple[str, ...] = ("loss",)) -> ReportHistory:
    """Return a history in which each rank has reported each name once a second."""
    history = ReportHistory()
    for time in range(seconds):
        for rank in range(ranks):
            for name in names:
                history.add(row(float(time), float(time), rank, name))
    return history


def recovered(history: ReportHistory) -> ReportHistory:
    """Return the history after a restart."""
    made = ReportHistory()
    made.recover(json.loads(json.dumps(history.state())))
    return made


def test_rows_are_sorted_by_time() -> None:
    history = ReportHistory()
    for time, rank in [(3.0, 1), (1.0, 0), (2.0, 1)]:
        history.add(row(time, rank=rank))

    assert [found.time for found in history.rows()] == [1.0, 2.0, 3.0]


def test_the_newest_value_within_a_second_counts() -> None:
    history = ReportHistory()
    for time in (0.0, 0.2, 0.4, 1.3, 1.5, 1.7, 2.9):
        history.add(row(time, time))

    assert [found.time for found in history.rows()] == [0.0, 1.3, 2.9]


def test_a_repeated_row_counts_once() -> None:
    history = ReportHistory()
    for time in (0.0, 0.01, 5.0, 5.01):
        history.add(row(time, version=int(time)))

    assert [found.time for found in history.rows()] == [0.0, 5.0]


def test_a_full_history_has_half_the_density_over_its_whole_length() -> None:
    history = filled(MAX_ROWS + 1)
    rows = history.rows()

    assert len(rows) == len(history) == MAX_ROWS // 2 + 1
    assert rows[0].time == 0.0
    assert rows[-1].time == MAX_ROWS
    assert {later.time - earlier.time for earlier, later in itertools.pairwise(rows)} == {2.0}


def test_a_history_stays_bounded_and_even() -> None:
    history = filled(5 * MAX_ROWS)
    rows = history.rows()

    assert MAX_ROWS // 4 < len(rows) <= MAX_ROWS
    assert (rows[0].time, rows[-1].time) == (0.0, 5 * MAX_ROWS - 1)
    steps = {later.time - earlier.time for earlier, later in itertools.pairwise(rows)}
    assert steps <= {8.0, 7.0}  # the distance of the newest row may be smaller


def test_thinning_treats_all_series_alike() -> None:
    history = filled(4000, ranks=2, names=("loss", "accuracy"))
    counts: dict[tuple[int, str], int] = {}
    for found in history.rows():
        counts[found.rank, found.name] = counts.get((found.rank, found.name), 0) + 1

    assert len(counts) == 4
    assert max(counts.values()) - min(counts.values()) <= 1


def test_more_series_than_rows_drop_the_oldest_series() -> None:
    history = ReportHistory()
    for rank in range(MAX_ROWS + 1):
        history.add(row(float(rank), rank=rank))
    rows = history.rows()

    assert len(rows) == MAX_THINNED_ROWS
    assert rows[-1].rank == MAX_ROWS


def test_names_are_bounded() -> None:
    history = ReportHistory()
    for number in range(MAX_METRICS):
        history.add(row(0.0, name=f"name {number}"))

    assert history.takes("name 7")
    assert not history.takes("one too many")
    assert not ReportHistory().takes("")
    assert not ReportHistory().takes("x" * (MAX_NAME_CHARACTERS + 1))
    assert not recovered(history).takes("one too many")


def test_a_clock_set_back_does_not_stop_the_history() -> None:
    history = filled(100)
    for time in range(1000):
        history.add(row(-5000.0 + time, float(time)))

    assert len(history) == 1100


def test_values_that_are_not_finite_survive_a_restart() -> None:
    history = ReportHistory()
    for time, value in enumerate((math.nan, math.inf, -math.inf, 1.5)):
        history.add(row(float(time), value))
    state = json.loads(json.dumps(history.state(), allow_nan=False))

    assert state == json.loads(json.dumps(recovered(history).state()))
    assert str([found.value for found in recovered(history).rows()]) == "[nan, inf, -inf, 1.5]"


TIMES = st.floats(-1e12, 1e12) | st.sampled_from([math.inf, -math.inf, math.nan])


@given(
    st.lists(st.tuples(TIMES, st.floats(), st.integers(0, 3), st.sampled_from("abc"))),
    st.integers(0, 30),
)
def test_a_recovered_history_continues_identically(rows: list[tuple[Any, ...]], at: int) -> None:
    history = ReportHistory()
    for number, (time, value, rank, name) in enumerate(rows):
        if number == at:
            history = recovered(history)
        history.add(MetricRow(time, number, rank, rank, name, value))
    plain = ReportHistory()
    for number, (time, value, rank, name) in enumerate(rows):
        plain.add(MetricRow(time, number, rank, rank, name, value))

    assert str(history.state()) == str(plain.state())
    assert len(history) == len(history.rows())


class ReplicatedLog:
    """Coordinator log whose commands a standby applies as they arrive."""

    def __init__(self, standby: CoordinatorMachine) -> None:
        self.standby = standby

    def write(self, command: Command[object], now: float) -> None:
        line = json.dumps(RecordedCommand(command, now).as_json())
        replay(self.standby, [RecordedCommand.from_json(json.loads(line))])

    def rotate(self, coordinator: CoordinatorMachine) -> None: ...


def test_a_standby_that_connects_later_has_the_same_history() -> None:
    rules = JobRules(policy("async"))
    recorder = Recorder(CoordinatorMachine(1, rules))
    worker = recorder.do(Join(rank=0, host="h", pid=1, device="cpu"), 0.0).worker

    def report(second: float, value: float) -> None:
        recorder.do(ReportValues(worker, [ReportedValue("loss", value, 1, second)]), second)

    report(1.0, 3.0)
    report(2.0, math.nan)
    standby = CoordinatorMachine(1, rules)
    standby.load_state(json.loads(json.dumps(recorder.coordinator.complete_state())), None, 0.0)
    recorder.journal = ReplicatedLog(standby)
    for second in range(3, 200):
        report(second / 3, 1.0 / second)

    assert len(standby.reported.history) > 60
    assert json.dumps(standby.job.as_json()) == json.dumps(recorder.coordinator.job.as_json())


def test_a_coordinator_without_reported_values_has_the_state_of_earlier_releases() -> None:
    state = CoordinatorMachine(1, JobRules(policy("async"))).job.as_json()

    assert "history" not in state
    assert state["metrics"] == {}


def test_a_name_is_shown_from_the_lowest_rank_that_is_not_lost() -> None:
    recorder = Recorder(CoordinatorMachine(1, JobRules(policy("async"))))
    workers = [
        recorder.do(Join(rank=rank, host="h", pid=1, device="cpu"), 0.0).worker for rank in (0, 1)
    ]

    def report(rank: int, value: float) -> float:
        values = [ReportedValue("loss", value, 1, 0.0)]
        recorder.do(ReportValues(workers[rank], values), 1.0)
        return recorder.coordinator.reported.latest["loss"][1]

    assert [report(1, 1.0), report(0, 2.0), report(1, 3.0)] == [1.0, 2.0, 2.0]
    recorder.do(Leave(workers[0], ""), 1.0)
    assert report(1, 4.0) == 2.0
    workers[0] = recorder.do(Join(rank=0, host="h", pid=1, device="cpu"), 0.0).worker
    report(0, 5.0)
    recorder.do(Lose(workers[0], ""), 1.0)
    assert report(1, 6.0) == 5.0, "an earlier worker of this rank was done"


def test_the_values_of_a_lost_worker_are_replaced() -> None:
    recorder = Recorder(CoordinatorMachine(1, JobRules(policy("async"))))
    first, second = (
        recorder.do(Join(rank=rank, host="h", pid=1, device="cpu"), 0.0).worker for rank in (0, 1)
    )
    for worker in (first, second):
        recorder.do(ReportValues(worker, [ReportedValue("loss", float(worker), 1, 0.0)]), 1.0)
    recorder.do(Lose(first, ""), 1.0)
    recorder.do(ReportValues(second, [ReportedValue("loss", 9.0, 2, 0.0)]), 1.0)

    assert recorder.coordinator.reported.latest["loss"] == (1, 9.0)
