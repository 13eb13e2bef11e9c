"""A worker's exchanges with all shards at the same time, also while their number changes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from pscommon.core.errors import LayoutError
from pscommon.core.partition import PartitionPlan
from pscommon.telemetry.logs import get_logger
from pscommon.tracing.recorder import worker_spans
from psproto.v1 import parameter_server_pb2 as ps
from psworker.connection.connection import Connection
from psworker.connection.retry import RetryDeadline
from psworker.core.results import PushResult
from psworker.exchange.client_buffers import ClientBuffers
from psworker.exchange.shard_exchange import SentBefore, ShardExchange, combined
from psworker.exchange.transfer import ShardTransfer
from psworker.transport.exchange_calls import Cancellation

log = get_logger(__name__)


class AllShards:
    """The shards of a registered model, as one worker reaches them.

    Attributes:
        connection: The worker's connection.
        plan: Partition of the model.
        buffers: Flat buffers for gradients and weights; the fastest memory for an exchange.
        version: Version of the weights that were pulled last, the smallest over the shards.
            Gradients count as computed from it.
    """

    def __init__(self, connection: Connection, plan: PartitionPlan, buffers: ClientBuffers) -> None:
        self.connection = connection
        self.plan = plan
        self.buffers = buffers
        self.version = 0

    def run(
        self,
        transfer: ShardTransfer,
        header: ps.PushPullHeader,
        sent: SentBefore = SentBefore.NEVER,
        watch: Callable[[Cancellation], None] | None = None,
    ) -> tuple[ShardTransfer, Sequence[ShardExchange]]:
        """Carry out a transfer with all shards; send it again while their number changes.

        watch: Receives the Cancellation of each attempt.
        """
        connection, buffers = self.connection, self.buffers
        retry: RetryDeadline | None = None
        worker_spans.open_push(connection.membership.worker, header.seq)
        while True:
            if buffers.is_to_be_offered:
                self.offer_memory()
            buffers.copy_in(transfer)
            try:
                connection.check()
                cancellation = Cancellation(is_alone=transfer.plan.shards == 1)
                if watch is not None:
                    watch(cancellation)
                headers = buffers.headers(transfer, header, connection.membership)
                exchanges = [
                    ShardExchange(
                        connection.transport,
                        shard,
                        shard_header,
                        part.sent,
                        partial(transfer.views, shard),
                        part.nbytes,
                        connection.limits,
                        cancellation,
                        sent,
                    )
                    for shard, (shard_header, part) in enumerate(
                        zip(headers, transfer.parts, strict=True)
                    )
                ]
                connection.executor.run(exchanges, cancellation)
                return transfer, exchanges
            except LayoutError as error:
                buffers.reset()
                retry = retry or connection.new_retry("the reshard to another number of servers")
                self.relocate(error)
                retry.handle_wait(f"servers that do not know it yet: {error}")
            except BaseException:
                buffers.reset()  # servers may still read or write it
                raise
            transfer = replace(transfer, plan=self.plan)
            sent = SentBefore.CALL if sent is SentBefore.NEVER else sent

    def record(self, transfer: ShardTransfer, exchanges: Sequence[ShardExchange]) -> PushResult:
        """Take the weights of finished exchanges, and return their outcome."""
        self.buffers.take_weights(transfer, exchanges)
        result = combined(exchanges)
        self.connection.membership.require_version(result.version)
        if transfer.weights is not None:
            self.version = result.version
        return result

    def offer_memory(self) -> None:
        """Offer the flat buffers to all servers, unless they have attached them."""
        connection = self.connection
        if connection.membership.worker:
            with connection.new_retry("offering shared memory").attempt():
                self.buffers.offer(
                    connection.transport, connection.membership, connection.limits.call
                )

    def relocate(self, error: LayoutError) -> None:
        """Update the servers' addresses and the partition; share no memory with former servers."""
        before = self.plan.shards
        if not self.connection.find_servers():
            log.debug("servers_unchanged", problem=str(error))
            return
        self.plan = PartitionPlan(self.plan.spec, len(self.connection.transport.addresses))
        self.buffers.reset()
        log.info("reshard_followed", shards_before=before, shards=self.plan.shards)
