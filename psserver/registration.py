"""How a worker states its model, on shard 0."""

import time

from pscommon.core.model import ModelSpec
from psserver.core.recorder import Recorder
from psserver.core.room import check_room, push_nbytes
from psserver.desk import Desk
from psserver.engine import Engine
from psserver.notices import tell_adopted


def register(
    desk: Desk, engine: Engine, shards: int, in_flight: int, worker: int, spec: ModelSpec, seconds: float
) -> str:
    """Return ready, upload or pending; wait up to `seconds` while there is nothing to do but wait.

    Raises MismatchError where the job trains another model.
    """
    nbytes, asked = push_nbytes(spec, shards), time.monotonic()

    def ask(recorder: Recorder, now: float) -> str | None:
        coordinator = recorder.coordinator
        check_room(coordinator, worker, nbytes, in_flight)
        if coordinator.doubtful(worker, asked):
            coordinator.member(worker, now)
            return None
        before = coordinator.model
        state: str = recorder.do("register", now, worker=worker, spec=spec)
        tell_adopted(before, coordinator.model)
        return None if state == "pending" else state

    answer = desk.until(ask, seconds)
    if desk.coordinator.model is not None:
        engine.set_model(desk.coordinator.model)
    return answer or "pending"
