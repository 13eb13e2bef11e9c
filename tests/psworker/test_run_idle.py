"""What ps-run decides about a run in which no step was counted."""

import pytest

from psworker.run.ending import Outcome
from psworker.run.messages import Bound, Collected, Exited, Finish, StopAnswered, StopJob
from psworker.run.supervise import Supervisor

WHY = "nothing was trained"


@pytest.mark.parametrize(
    ("allow_idle", "outcome"),
    [(False, Outcome("failed", 16, reason=WHY)), (True, Outcome("done"))],
)
def test_a_run_without_a_step_fails_after_its_servers_have_ended_in_order(allow_idle: bool, outcome: Outcome) -> None:
    machine = Supervisor(1, 1, max_restarts=0, durable=False, grace=5.0, allow_idle=allow_idle)
    machine.start(0.0)
    machine.step(Bound("s0"), 0.0)
    machine.step(Exited("w0", 0), 0.0)

    assert machine.step(Collected(idle=WHY), 0.0) == [StopJob()]
    machine.step(StopAnswered(), 0.0)

    assert machine.step(Exited("s0", 0), 0.0) == [Finish(outcome)]
