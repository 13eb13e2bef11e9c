"""Percentage and remaining time of the current pass, as the status shows them."""

from typing import Any

import pytest

from pscommon.core.data_loop import LoopSpec
from pscommon.core.data_stream import Spec, StreamSpec
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.job.policy import policy
from psserver.core.job.settings import JobRules
from psserver.monitoring.pass_progress import WINDOW_SECONDS, PassProgress


class Training:
    """One worker that counts batches of loops, and a clock."""

    def __init__(self) -> None:
        self.coordinator = CoordinatorMachine(1, JobRules(policy("async")))
        self.progress = PassProgress()
        self.now = 1000.0
        self.update()

    def update(self) -> None:
        self.progress.update(self.coordinator, self.now)

    def count(self, spec: Spec, batches: int, seconds: float = 1.0) -> None:
        """Count batches; each takes this long."""
        loop = self.coordinator.ledger.open(1, spec)
        for _ in range(batches):
            (number,) = loop.take(1, loop.committed, 1, [1])
            loop.commit(1, number)
            self.now += seconds
            self.update()

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds)):
            self.now += 1.0
            self.update()

    @property
    def status(self) -> dict[str, Any]:
        return self.progress.describe(self.coordinator, self.now)

    @property
    def line(self) -> tuple[Any, ...]:
        return tuple(
            self.status[key] for key in ("loop", "pass", "passes", "percent", "remaining_seconds")
        )


@pytest.fixture
def training() -> Training:
    return Training()


def test_nothing_is_shown_before_a_batch_has_counted(training: Training) -> None:
    assert training.line == (None, None, None, None, None)
    assert training.status["loss"] is None


def test_each_pass_of_one_loop_has_its_percentage(training: Training) -> None:
    spec = LoopSpec(0, size=100, batch_size=10, epochs=3)
    training.count(spec, 4, seconds=2.0)
    assert training.line == (0, 1, 3, 40.0, 12.0)
    training.count(spec, 6)
    assert training.line[:4] == (0, 2, 3, 0.0)
    training.count(spec, 20)
    assert training.line == (0, 3, 3, 100.0, 0.0)


def test_one_loop_per_pass_has_its_percentage(training: Training) -> None:
    training.count(LoopSpec(0, size=40, batch_size=10), 4)
    training.count(LoopSpec(1, size=40, batch_size=10, first_epoch=1), 1)
    assert training.line == (1, 2, None, 25.0, None)
    training.count(LoopSpec(1, size=40, batch_size=10, first_epoch=1), 1)

    assert training.line == (1, 2, None, 50.0, 2.0)


def test_an_evaluation_loop_is_not_the_current_pass(training: Training) -> None:
    train, test = LoopSpec(0, size=40, batch_size=10), LoopSpec(1, size=20, batch_size=10)
    training.count(train, 2)
    loop = training.coordinator.ledger.open(1, test, place=0)
    assert loop.take(1, 0, 1, [1])
    loop.drop(1)
    training.update()

    assert training.line[0] == 0


def test_a_stream_has_no_percentage(training: Training) -> None:
    training.count(StreamSpec(0, sources=1, batch_size=10), 3)

    assert training.line == (0, None, None, None, None)


def test_a_job_without_progress_shows_no_remaining_time(training: Training) -> None:
    training.count(LoopSpec(0, size=100, batch_size=10), 4)
    training.wait(WINDOW_SECONDS + 5)

    assert training.line == (0, 1, None, 40.0, None)


def test_the_speed_is_that_of_the_last_seconds(training: Training) -> None:
    spec = LoopSpec(0, size=1000, batch_size=1)
    training.count(spec, 100, seconds=10.0)
    training.count(spec, 100, seconds=1.0)

    assert training.status["remaining_seconds"] == pytest.approx(800.0, rel=0.05)


def test_the_pass_starts_again_after_a_rollback(training: Training) -> None:
    training.count(LoopSpec(0, size=100, batch_size=10), 4)
    training.coordinator = CoordinatorMachine(1, JobRules(policy("async")))
    assert training.line[0] is None
    training.count(LoopSpec(0, size=100, batch_size=10), 2)

    assert training.line == (0, 1, None, 20.0, 8.0)


def test_an_empty_data_set_has_no_progress(training: Training) -> None:
    training.coordinator.ledger.open(1, LoopSpec(0, size=0, batch_size=10))
    training.update()

    assert training.line[3] is None
