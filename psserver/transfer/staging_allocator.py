"""Room for pushes that come: within the budget where they come over the wire, else in the
worker's shared memory.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from psproto.v1 import parameter_server_pb2 as pb
from psserver.parameters.staging import Staging

if TYPE_CHECKING:
    from psserver.shard.engine import ShardEngine


class StagingAllocator:
    """Where the pushes of one shard go, and are until they are decided."""

    def __init__(self, engine: "ShardEngine") -> None:
        self._engine = engine

    def take(self, header: pb.PushPullHeader, alive: Callable[[], bool]) -> Staging:
        """Where the push of this header goes. Waits for the model, and for room (InFlightError:
        there was none).
        """
        engine, seconds = self._engine, header.wait_ms / 1000
        store = engine.wait_for_store(seconds)
        if header.memory:
            return store.staging_on(
                engine.memories.tapes(header).gradients, header.absent, header.initial
            )
        engine.memories.check_wire()
        nbytes = store.nbytes if header.initial else store.step_nbytes
        claim = engine.budget.take(header.worker, nbytes, seconds, alive)
        try:
            staging = store.staging(header.absent, header.initial)
        except BaseException:
            engine.budget.give(claim)
            raise
        staging.claim = claim
        return staging

    def give(self, staging: Staging) -> None:
        """Nobody needs the push's bytes any more."""
        claim, staging.claim = staging.claim, None
        if (store := self._engine.store) is not None:
            store.release(staging)
        if claim is not None:
            self._engine.budget.give(claim)
