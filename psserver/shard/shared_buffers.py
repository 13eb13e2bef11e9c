"""Memory of workers on this host that the server has attached: pushes are read from it, pulls
written to it.
"""

import logging
from typing import NamedTuple

import torch

from pscommon.core.errors import InvalidRequestError, UnreachableError
from pscommon.settings.values import Lanes
from pscommon.system.shared_memory import MemoryOffer, NotSharedError, attach, sweep
from psproto.v1 import parameter_server_pb2 as pb
from psserver.parameters.partition import WorkerBuffer

log = logging.getLogger("psserver")


class WorkerBuffers(NamedTuple):
    """A worker's two tapes. number: of the offer."""

    number: int
    gradients: WorkerBuffer
    weights: WorkerBuffer


class AttachedBuffers:
    """By worker, the last one that it offered. What a staged push refers to stays mapped as long
    as it is needed.
    """

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._tapes: dict[int, WorkerBuffers] = {}

    def attach(self, request: pb.AttachMemoryRequest) -> str:
        """Takes an offer; why not, in words, or nothing."""
        if self._lanes == "grpc":
            return "the server runs with --lanes grpc"
        try:
            memory = attach(MemoryOffer(request.name, request.token, request.nbytes)).memory
        except NotSharedError as error:
            return str(error)
        whole = (
            torch.frombuffer(memory, dtype=torch.uint8)
            if request.nbytes
            else torch.empty(0, dtype=torch.uint8)
        )
        gradients, weights = whole[: request.nbytes // 2], whole[request.nbytes // 2 :]
        self._tapes[request.worker] = WorkerBuffers(
            request.memory, WorkerBuffer(gradients), WorkerBuffer(weights)
        )
        log.info("memory attached", extra={"worker": request.worker, "nbytes": request.nbytes})
        return ""

    def check_wire(self) -> None:
        """InvalidRequestError where pushes may not come over the network."""
        if self._lanes == "shm":
            raise InvalidRequestError(
                "this server runs with --lanes shm: pushes come through shared memory only"
            )

    def tapes(self, header: pb.PushPullHeader) -> WorkerBuffers:
        """Those that a request names. UnreachableError where they are not attached (any more):
        offer them again.
        """
        tapes = self._tapes.get(header.worker)
        if tapes is None or tapes.number != header.memory:
            raise UnreachableError(
                f"memory {header.memory} of worker {header.worker} is not attached", "NOT_ATTACHED"
            )
        return tapes

    def clear(self) -> None:
        """All workers are out."""
        self._tapes.clear()
        sweep()

    def drop(self, worker: int) -> None:
        """The worker is out of the job. If it died while its file still had a name, the name
        goes now.
        """
        self._tapes.pop(worker, None)
        sweep()
