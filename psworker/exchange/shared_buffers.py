"""A worker's two flat buffers, in memory that servers of the same host share.

The servers read gradients from it and write weights to it.
"""

import logging
from collections.abc import Collection, Sequence

from pscommon.core.errors import (
    FencedError,
    InvalidRequestError,
    MismatchError,
    PSError,
    UnreachableError,
)
from pscommon.settings.values import Lanes
from pscommon.system.shared_memory import NoSharedMemoryError, SharedRegion, sweep
from psproto.v1 import parameter_server_pb2 as ps
from psworker.connection.membership import WorkerMembership
from psworker.exchange.transfer import ShardTransfer
from psworker.transport.grpc import Transport

log = logging.getLogger("psworker")


class ClientBuffers:
    """The flat buffers of one worker, at a fixed address.

    `offer` and `detach` remap the memory; bytes that another thread writes meanwhile may be
    lost. Between `hold` and `release` neither remaps it: the script computes while another
    thread transfers bytes.

    Attributes:
        gradients: Writable bytes for the gradients, `nbytes` of them.
        weights: Writable bytes for the weights, `nbytes` of them.
        number: Number of the current offer; 0 if there is none.
        shards: Shards that have attached the current offer.
    """

    def __init__(self, nbytes: int, lanes: Lanes) -> None:
        self.number = 0
        self.shards: frozenset[int] = frozenset()
        self._lanes = lanes
        self._wanted = lanes != "grpc"
        self._offers = 0
        self._held = self._detaches = False
        self._region = SharedRegion(2 * nbytes)
        self.gradients, self.weights = self._region.memory[:nbytes], self._region.memory[nbytes:]

    @property
    def is_to_be_offered(self) -> bool:
        """True if `offer` would send requests."""
        return self._wanted and not self.number and not self._held

    def offer(self, lane: Transport, place: WorkerMembership, timeout: float) -> None:
        """Offer the memory to all servers, unless there is a current offer.

        Shards that cannot attach it use gRPC. If a server does not answer, all shards use gRPC
        until the next call.

        timeout: Deadline of each request in seconds.

        Raises:
            InvalidRequestError: `--lanes shm` is set, and a shard cannot attach the memory.
            FencedError: The worker has lost its membership.
            MismatchError: A server runs another job.
        """
        if not self.is_to_be_offered:
            return
        try:
            reasons = self._offer(lane, place, timeout)
        except PSError as error:
            self.detach()
            if isinstance(error, UnreachableError):
                return
            raise
        if self._lanes == "shm" and reasons:
            self.detach()
            raise InvalidRequestError(f"--lanes shm is not possible: {'; '.join(reasons)}")
        if self.shards:
            others = f", over gRPC to the others: {'; '.join(reasons)}" if reasons else ""
            log.info(
                "tensors move through shared memory to shards %s%s", sorted(self.shards), others
            )
        if not self.shards:
            self._wanted = False
            self.detach()
            log.info("tensors move over gRPC, not shared memory: %s", reasons[0])

    def take_in(self, move: ShardTransfer) -> None:
        """Copy the gradients of attached shards to shared memory, unless they are there already."""
        if move.gradients is not None and move.gradients is not self.gradients:
            inner = ShardTransfer(move.plan, self.gradients, None, move.absent, move.everything)
            for shard in self.shards:
                _copy(move.sent(shard), inner.sent(shard))

    def give_out(self, move: ShardTransfer, lost: Collection[int]) -> None:
        """Copy the weights that attached shards have written to the transfer's buffer.

        lost: Shards that have sent their weights over gRPC instead.
        """
        if move.weights is not None and move.weights is not self.weights:
            inner = ShardTransfer(move.plan, None, self.weights, move.absent, move.everything)
            for shard in self.shards.difference(lost):
                _copy(inner.received(shard), move.received(shard))

    def detach(self) -> None:
        """Make the memory private again: servers and worker no longer see each other's writes.

        While the memory is held, the detachment waits for `release`.
        """
        self.number, self.shards = 0, frozenset()
        self._detaches = self._held
        if not self._held:
            self._region.detach()

    def hold(self) -> None:
        """Keep the mapping: the script computes while another thread transfers bytes."""
        self._held = True

    def release(self) -> None:
        """Allow remapping: no other thread transfers bytes. May be called again."""
        self._held = False
        if self._detaches:
            self.detach()

    def close(self) -> None:
        """Remove the shared file's name. Views that are still in use stay valid."""
        self._region.hide()

    def _offer(self, lane: Transport, place: WorkerMembership, timeout: float) -> Sequence[str]:
        """Return the reason of each shard that did not attach the memory."""
        sweep()
        try:
            offer = self._region.share()
        except NoSharedMemoryError as error:
            return [str(error)]
        self._offers += 1
        request = ps.AttachMemoryRequest(
            job=place.job,
            worker=place.worker,
            memory=self._offers,
            name=offer.name,
            nbytes=offer.nbytes,
            token=offer.token,
        )
        try:
            answers = {
                shard: _asked(lane, shard, request, timeout) for shard in range(len(lane.addresses))
            }
        finally:
            self._region.hide()
        self.number = self._offers
        self.shards = frozenset(shard for shard, reason in answers.items() if not reason)
        return [f"shard {shard}: {reason}" for shard, reason in answers.items() if reason]


def _copy(sources: Sequence[memoryview], targets: Sequence[memoryview]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target[:] = source


def _asked(lane: Transport, shard: int, request: ps.AttachMemoryRequest, timeout: float) -> str:
    """Return why the shard did not attach the memory; empty if it did.

    Raises UnreachableError, FencedError or MismatchError.
    """
    try:
        answer = lane.attach(shard, request, timeout)
    except (UnreachableError, FencedError, MismatchError):
        raise
    except PSError as error:
        return str(error)
    return "" if answer.attached else answer.reason or "no reason given"
