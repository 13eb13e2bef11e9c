"""The outcome of a run in which no step was counted."""

import pytest

from psworker.supervision.decisions import (
    FinishRun,
    RunOutcome,
    StopJob,
)
from psworker.supervision.supervisor import Supervisor

WHY = "nothing was trained"


@pytest.mark.parametrize(
    ("allow_idle", "outcome"),
    [(False, RunOutcome("failed", 16, reason=WHY)), (True, RunOutcome("done"))],
)
def test_a_run_without_a_step_fails_after_an_orderly_stop(
    allow_idle: bool, outcome: RunOutcome
) -> None:
    machine = Supervisor(1, 1, max_restarts=0, durable=False, grace=5.0, allow_idle=allow_idle)
    machine.start(0.0)
    machine.bound("s0", 0.0)
    machine.exited("w0", 0, "", 0.0)

    assert machine.collected("", WHY, 0.0) == [StopJob()]
    machine.stop_answered("", 0.0)

    assert machine.exited("s0", 0, "", 0.0) == [FinishRun(outcome)]
