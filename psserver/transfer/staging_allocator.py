"""Allocate memory for incoming pushes: within the byte budget for pushes from the network, or in
the worker's shared memory.
"""

from collections.abc import Callable

from psproto.v1 import parameter_server_pb2 as pb
from psserver.parameters.staging import Staging
from psserver.shard.engine import ShardEngine


class StagingAllocator:
    """Allocates the staging of each push to one shard. `ShardEngine.release` frees it."""

    def __init__(self, engine: ShardEngine) -> None:
        self._engine = engine

    def take(self, header: pb.PushPullHeader, is_connected: Callable[[], bool]) -> Staging:
        """Return memory for the push of this header.

        Waits until the model is known and the budget has room. Raises InFlightError if the budget
        has no room in time.
        """
        engine, seconds = self._engine, header.wait_ms / 1000
        store = engine.live.wait_for_store(seconds, header.shards)
        if header.memory:
            return store.stage_worker_buffer(
                engine.traffic.shared_buffers.find(header).gradients, header.absent, header.initial
            )
        engine.traffic.shared_buffers.check_network_allowed()
        nbytes = store.nbytes if header.initial else store.step_nbytes
        claim = engine.traffic.budget.take(header.worker, nbytes, seconds, is_connected)
        try:
            staging = store.allocate_staging(header.absent, header.initial)
        except BaseException:
            engine.traffic.budget.release(claim)
            raise
        staging.claim = claim
        return staging
