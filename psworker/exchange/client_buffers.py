"""A worker's two flat buffers, in memory that servers of the same host share.

The servers read gradients from it and write weights to it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from pscommon.core.errors import (
    FencedError,
    InvalidRequestError,
    MismatchError,
    PSError,
    UnreachableError,
)
from pscommon.core.partition import PartitionPlan
from pscommon.settings.values import Lanes
from pscommon.system.shared_memory import NoSharedMemoryError, SharedRegion
from pscommon.telemetry.logs import get_logger
from pscommon.wire.frames import Filler
from pscommon.wire.push import parts_to_proto
from psproto.v1 import parameter_server_pb2 as ps
from psworker.connection.membership import WorkerMembership
from psworker.exchange.shard_exchange import ShardExchange
from psworker.exchange.transfer import ExchangeBuffer, ScatteredBuffer, ShardTransfer
from psworker.transport.interface import Transport

log = get_logger(__name__)


class ClientBuffers:
    """The flat buffers of one worker, at a fixed address.

    `offer` and `detach` remap the memory; bytes that another thread writes meanwhile may be
    lost. Between `pin` and `unpin` neither remaps it: the script computes while another
    thread transfers bytes.

    Attributes:
        gradients: Writable bytes for the gradients, `nbytes` of them.
        weights: Writable bytes for the weights, `nbytes` of them.
        number: Number of the current offer; 0 if there is none.
        shards: Shards that have attached the current offer.
    """

    def __init__(self, nbytes: int, is_shared: bool = True, is_required: bool = False) -> None:
        """Create the buffers.

        Args:
            nbytes: Size of each buffer.
            is_shared: Offer the memory to the servers.
            is_required: Fail if a server cannot attach it.
        """
        self.number = 0
        self.shards: frozenset[int] = frozenset()
        self._is_required = is_required
        self._is_wanted = is_shared
        self._offers = 0
        self._is_pinned = self._detach_on_unpin = False
        # A weights buffer, and the version by shard that it holds.
        self._pulled: tuple[memoryview, list[int]] | None = None
        self._transfer: ShardTransfer | None = None  # the last one of these buffers
        self._region = SharedRegion(2 * nbytes)
        self.gradients, self.weights = self._region.memory[:nbytes], self._region.memory[nbytes:]

    @property
    def is_to_be_offered(self) -> bool:
        """True if `offer` would send requests."""
        return self._is_wanted and not self.number and not self._is_pinned

    def offer(self, transport: Transport, membership: WorkerMembership, timeout: float) -> None:
        """Offer the memory to all servers, unless there is a current offer.

        For shards that cannot attach it bytes travel over the network. If a server does not answer,
        they do so for all shards until the next call.

        timeout: Deadline of each request in seconds.

        Raises:
            InvalidRequestError: `--lanes shm` is set, and a shard cannot attach the memory.
            FencedError: The worker has lost its membership.
            MismatchError: A server runs another job.
        """
        if not self.is_to_be_offered:
            return
        try:
            reasons = self._offer(transport, membership, timeout)
        except PSError as error:
            self.detach()
            if isinstance(error, UnreachableError):
                return
            raise
        if self._is_required and reasons:
            self.detach()
            raise InvalidRequestError(
                f"`--lanes shm` is not possible: {'; '.join(reasons)}. Try: `--lanes auto`"
            )
        if self.shards:
            others = {"not_shared": "; ".join(reasons)} if reasons else {}
            log.info("shared_memory_used", shards=sorted(self.shards), **others)
        if not self.shards:
            self._is_wanted = False
            self.detach()
            log.info("shared_memory_unavailable", reason=reasons[0])

    def transfer(
        self,
        plan: PartitionPlan,
        gradients: ExchangeBuffer | None,
        weights: ExchangeBuffer | None,
        absent: Collection[int],
    ) -> ShardTransfer:
        """Return what a step transfers. Steps with these two buffers use one transfer again."""
        last = self._transfer
        if (
            last is not None
            and last.plan is plan
            and last.gradients is gradients
            and last.weights is weights
            and last.absent == frozenset(absent)
        ):
            return last
        transfer = ShardTransfer(plan, gradients, weights, frozenset(absent))
        # other buffers belong to the script, which may free them
        if gradients is self.gradients and weights is self.weights:
            self._transfer = transfer
        return transfer

    def copy_in(self, transfer: ShardTransfer) -> None:
        """Copy the gradients of attached shards to shared memory, unless they are there already."""
        is_here = transfer.gradients is None or transfer.gradients is self.gradients
        if not is_here and transfer.states is None:
            inner = ShardTransfer(
                transfer.plan, self.gradients, None, transfer.absent, transfer.everything
            )
            for shard in self.shards:
                _copy(transfer.sent(shard), inner.sent(shard))

    def headers(
        self, transfer: ShardTransfer, header: ps.PushPullHeader, membership: WorkerMembership
    ) -> list[ps.PushPullHeader]:
        """Return the header for each shard: addressed, and with the fields about the memory."""
        header.job, header.worker = membership.job, membership.worker
        header.min_version, header.shards = membership.min_version, transfer.plan.shards
        # Versions that the weights buffer holds, by shard. Without them, a server sends all
        # tensors, as it does for a pull without a push.
        versions: list[int] | None = None
        if self._pulled is not None and self._pulled[0] is transfer.weights:
            versions = self._pulled[1] if header.seq and header.pull == ps.PULL_STEP else None
        found = []
        for shard in range(transfer.plan.shards):
            own = ps.PushPullHeader()
            own.CopyFrom(header)
            own.memory = self.number if shard in self.shards else 0
            if transfer.states is not None:  # optimizer state has no shared memory
                own.memory = 0
                own.parts.extend(parts_to_proto(transfer.named_parts(shard)))
            if versions is not None:
                own.have = versions[shard]
            found.append(own)
        return found

    def take_weights(self, transfer: ShardTransfer, exchanges: Sequence[ShardExchange]) -> None:
        """Copy the weights that attached shards have written to the transfer's buffer.

        exchanges: The finished exchanges, by shard.
        """
        lost = [shard for shard, exchange in enumerate(exchanges) if exchange.lost_memory]
        if transfer.weights is not None and transfer.weights is not self.weights:
            inner = ShardTransfer(
                transfer.plan, None, self.weights, transfer.absent, transfer.everything
            )
            for shard in self.shards.difference(lost):
                _copy(inner.received(shard), transfer.received(shard))
        if isinstance(transfer.weights, ScatteredBuffer):
            self._pulled = None  # the caller's arrays are not kept
        elif transfer.weights is not None:
            self._pulled = transfer.weights, [exchange.version for exchange in exchanges]
        if lost:
            self.detach()

    def reset(self) -> None:
        """Share no memory, and assume no version of the weights: an exchange has failed."""
        self._pulled = None
        self.detach()

    def detach(self) -> None:
        """Make the memory private again: servers and worker no longer see each other's writes.

        While the memory is pinned, the detachment waits for `unpin`.
        """
        self.number, self.shards = 0, frozenset()
        self._detach_on_unpin = self._is_pinned
        if not self._is_pinned:
            self._region.detach()

    def pin(self) -> None:
        """Keep the mapping: the script computes while another thread transfers bytes."""
        self._is_pinned = True

    def unpin(self) -> None:
        """Allow remapping: no other thread transfers bytes. May be called again."""
        self._is_pinned = False
        if self._detach_on_unpin:
            self.detach()

    def _offer(
        self, transport: Transport, membership: WorkerMembership, timeout: float
    ) -> Sequence[str]:
        """Return the reason of each shard that did not attach the memory."""
        self._offers += 1
        header = ps.PushPullHeader(
            job=membership.job,
            worker=membership.worker,
            memory=self._offers,
            wait_ms=round(timeout * 1000 / 2),
        )
        descriptor: int | None = None

        def share() -> int:
            nonlocal descriptor
            descriptor = self._region.share() if descriptor is None else descriptor
            return descriptor

        reasons: dict[int, str] = {}
        for shard in range(len(transport.addresses)):
            try:
                transport.offer_memory(shard, header, share, timeout)
            except NoSharedMemoryError as error:
                return [str(error)]
            except (UnreachableError, FencedError, MismatchError):
                raise
            except PSError as error:
                reasons[shard] = f"shard {shard}: {error}"
        self.number = self._offers
        self.shards = frozenset(range(len(transport.addresses))).difference(reasons)
        return list(reasons.values())


LANES: Mapping[Lanes, Callable[[int], ClientBuffers]] = {
    "auto": ClientBuffers,
    "stream": partial(ClientBuffers, is_shared=False),
    "grpc": partial(ClientBuffers, is_shared=False),
    "shm": partial(ClientBuffers, is_required=True),
}
"""The lanes by the value of `--lanes`: each creates buffers of a size in bytes."""


def _copy(sources: Sequence[memoryview], targets: Sequence[memoryview]) -> None:
    filler = Filler(targets)
    for source in sources:
        filler.fill(source)
