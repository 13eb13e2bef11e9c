"""A worker's two tapes, in memory that servers of the same host share: they read gradients and
write weights there.
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
    """`gradients` and `weights`, writable, `nbytes` each, at one address for life.

    number: of the offer that stands, 0: none. shards: those that have attached it.

    Memory is mapped anew by `offer` and `detach`, and what somebody writes meanwhile may be
    lost. So while another thread moves bytes and the script's computes on, between `hold` and
    `release`, both leave the memory where it is.
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
        """Would `offer` ask the servers?"""
        return self._wanted and not self.number and not self._held

    def offer(self, lane: Transport, place: WorkerMembership, timeout: float) -> None:
        """To all servers, unless there is an offer that stands. Those that cannot attach are
        reached over gRPC.

        So are all where one does not answer now; the next call offers again. InvalidRequestError
        where --lanes shm demands what cannot be; FencedError, MismatchError.
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
        """Puts what shards will read from shared memory there, unless it is there already."""
        if move.gradients is not None and move.gradients is not self.gradients:
            inner = ShardTransfer(move.plan, self.gradients, None, move.absent, move.everything)
            for shard in self.shards:
                _copy(move.sent(shard), inner.sent(shard))

    def give_out(self, move: ShardTransfer, lost: Collection[int]) -> None:
        """Gets what shards have written to shared memory; the `lost` ones have sent it instead."""
        if move.weights is not None and move.weights is not self.weights:
            inner = ShardTransfer(move.plan, None, self.weights, move.absent, move.everything)
            for shard in self.shards.difference(lost):
                _copy(inner.received(shard), move.received(shard))

    def detach(self) -> None:
        """What servers still do to the memory that was offered no longer shows here, nor the
        other way.

        Where memory is held: from `release` on.
        """
        self.number, self.shards = 0, frozenset()
        self._detaches = self._held
        if not self._held:
            self._region.detach()

    def hold(self) -> None:
        """The script computes while another thread moves bytes."""
        self._held = True

    def release(self) -> None:
        """The script's own thread waits, and no other moves bytes. Harmless to repeat."""
        self._held = False
        if self._detaches:
            self.detach()

    def close(self) -> None:
        """Views that are still in use stay valid."""
        self._region.hide()

    def _offer(self, lane: Transport, place: WorkerMembership, timeout: float) -> Sequence[str]:
        """Returns why not, for each shard that did not attach."""
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
    """Why the shard did not attach. UnreachableError where it does not answer, FencedError,
    MismatchError.
    """
    try:
        answer = lane.attach(shard, request, timeout)
    except (UnreachableError, FencedError, MismatchError):
        raise
    except PSError as error:
        return str(error)
    return "" if answer.attached else answer.reason or "no reason given"
