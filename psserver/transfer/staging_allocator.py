"""Allocate memory for incoming pushes: within the byte budget for pushes from the network, or in
the worker's shared memory.
"""

from collections.abc import Callable

from psproto.v1 import parameter_server_pb2 as pb
from psserver.core.commands.request_checks import wait_seconds
from psserver.parameters.memory_budget import MemoryClaim
from psserver.parameters.staging import Staging
from psserver.parameters.store import ParameterStore
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
        engine, seconds = self._engine, wait_seconds(header.wait_ms)
        store = engine.live.wait_for_store(seconds, header.shards)
        if header.memory:
            return self.in_memory(header, store)
        nbytes = self.network_nbytes(header, store)
        claim = engine.traffic.budget.take(header.worker, nbytes, seconds, is_connected)
        return self.allocate(header, store, claim)

    def in_memory(self, header: pb.PushPullHeader, store: ParameterStore) -> Staging:
        """Return the worker's shared memory as staging."""
        buffers = self._engine.traffic.shared_buffers.find(header)
        return store.stage_worker_buffer(buffers.gradients, header.absent, header.initial)

    def network_nbytes(self, header: pb.PushPullHeader, store: ParameterStore) -> int:
        """Return the size of a push over the network.

        Raises InvalidRequestError if the server takes none.
        """
        self._engine.traffic.shared_buffers.check_network_allowed()
        return store.nbytes if header.initial else store.step_nbytes

    def allocate(
        self, header: pb.PushPullHeader, store: ParameterStore, claim: MemoryClaim
    ) -> Staging:
        """Return memory for a push. A failure releases the claim."""
        try:
            staging = store.allocate_staging(header.absent, header.initial)
        except BaseException:
            self._engine.traffic.budget.release(claim)
            raise
        staging.claim = claim
        return staging
