"""Workers' requests that wait for the coordinator or read its state: registration, data shares."""

import time

from pscommon.core.data_stream import Spec
from pscommon.core.errors import InvalidRequestError
from pscommon.core.model_spec import ModelSpec
from pscommon.snapshot.tensor_file import RESERVED
from pscommon.system.memory_limit import usable_memory
from psserver.coordinator.executor import CommandExecutor
from psserver.core.commands.recorder import Recorder
from psserver.core.commands.request_checks import check_memory
from psserver.core.commands.worker_share import worker_share
from psserver.core.job.admission import check_registration, push_nbytes
from psserver.monitoring.wait_notices import log_changed_hyper_parameters
from psserver.shard.engine import ShardEngine


def register(
    executor: CommandExecutor,
    engine: ShardEngine,
    shards: int,
    in_flight: int,
    worker: int,
    spec: ModelSpec,
    seconds: float,
) -> str:
    """Register a worker's model; wait up to `seconds` while the answer is pending.

    Returns:
        ready, upload or pending.

    Raises:
        MismatchError: The job trains another model.
        InvalidRequestError: No file or server can hold the model.
    """
    check_memory(spec, shards, usable_memory())
    nbytes, asked = push_nbytes(spec, shards), time.monotonic()

    def ask(recorder: Recorder, now: float) -> str | None:
        coordinator = recorder.coordinator
        check_registration(coordinator, worker, nbytes, in_flight)
        if coordinator.unresolved_peer(worker, asked):
            coordinator.member(worker, now)
            return None
        if coordinator.model is None:
            check_names(spec)
        before = coordinator.model
        state: str = recorder.do("register", now, worker=worker, spec=spec)
        log_changed_hyper_parameters(before, coordinator.model)
        return None if state == "pending" else state

    answer = executor.until(ask, seconds)
    if executor.coordinator.model is not None:
        engine.set_model(executor.coordinator.model)
    return answer or "pending"


def check_names(spec: ModelSpec) -> None:
    """Check that a snapshot file can hold the names of a new model's tensors.

    Raises:
        InvalidRequestError: A tensor has a reserved name.
    """
    if any(RESERVED in (tensor.name, *tensor.aliases) for tensor in spec.tensors):
        raise InvalidRequestError(
            f"cannot register the model: a tensor is named {RESERVED}, which safetensors files "
            "reserve. Try: rename this parameter or buffer"
        )


class DataShares:
    """Reads the coordinator's machine through the executor; it changes nothing, so nothing is
    recorded.
    """

    def __init__(self, executor: CommandExecutor) -> None:
        self._executor = executor

    def of(self, worker: int, spec: Spec) -> int:
        """Return the number of batches that the worker can expect (see worker_share)."""
        return self._executor.step(
            lambda recorder, now: worker_share(recorder.coordinator, worker, spec), quiet=True
        )
