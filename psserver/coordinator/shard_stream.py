"""The stream between shard 0 and another shard: updates go to the shard, its reports come back.

It translates messages and decides nothing (proto/psproto/v1/coordinator.proto: LinkShard).
"""

import contextlib
import json
import threading
import time
from collections.abc import Iterator

import grpc

from pscommon.core.formats import spoken_format
from pscommon.wire.messages import entry_to_proto, model_to_proto, report_from_proto
from psproto.v1 import coordinator_pb2 as pb
from psserver.coordinator.service import CoordinatorService
from psserver.core.job.snapshot_schedule import PartReport
from psserver.core.servers.catch_up import CatchUp
from psserver.core.servers.server_entry import DeliveryCursor, ServerEntry

UPDATE_INTERVAL_SECONDS = 1.0
MAX_SILENCE_SECONDS = 2.5
"""A shard that sends nothing for this long has lost its connection."""


def follow_shard(
    service: CoordinatorService,
    server: ServerEntry,
    connection: int,
    first: pb.LinkShardRequest,
    requests: Iterator[pb.LinkShardRequest],
    context: grpc.ServicerContext,
) -> Iterator[pb.LinkShardResponse]:
    """Send a shard its updates, while another thread reads its messages."""
    listener = ShardListener(service, server, connection, requests)
    listener.handle(first)
    listener.start()
    cursor, model = DeliveryCursor(first.report.epoch, first.report.index), ""
    while (
        context.is_active()
        and listener.is_alive()
        and listener.silent < MAX_SILENCE_SECONDS
        and server.connection == connection
    ):
        response, cursor, model = _next_response(service, server, cursor, model)
        if (spoken := spoken_format()) is not None:
            response.format = spoken
        yield response
        if response.stop:
            return
        service.shard_connections.wait_for_update(server, cursor, UPDATE_INTERVAL_SECONDS)


def _next_response(
    service: CoordinatorService, server: ServerEntry, cursor: DeliveryCursor, model: str
) -> tuple[pb.LinkShardResponse, DeliveryCursor, str]:
    """Return the next response, the cursor after it, and the fingerprint of the model that
    the shard then has.
    """
    update = service.shard_connections.next_update(server, cursor)
    is_over, durable = (
        service.is_over and service.stopped.is_set(),
        service.config.durability == "log",
    )
    if update is None:
        stop = server.is_leaving or is_over
        # a candidate needs them: a standby may be disconnected when the reshard starts
        registry = service.registry
        waits = pb.LinkShardResponse(
            job=service.job, stop=stop, waiting_for="ps-ctl reshard", standbys=registry.standbys
        )
        waits.term, waits.durable = registry[0].term, durable
        return waits, cursor, model
    response = pb.LinkShardResponse(
        job=service.job,
        addresses=update.registry.addresses,
        waiting_for=service.waiting_for,
        stop=is_over,
        epoch=update.cursor.log_id,
        base=update.base,
        entries=[entry_to_proto(entry) for entry in update.entries],
        snapshots=update.snapshots,
        term=service.registry[0].term,
        standbys=update.registry.standbys,
        shards=update.registry.shards,
        layout=update.registry.layout,
        move=update.reshard,
        policy=service.policy,
        mends=service.config.gradient_rules.mends,
        norms=service.config.gradient_rules.norms,
        durable=durable,
        processes=service.worker_exits.at(server.place),
    )
    response.recover, response.begin = (
        update.catch_up is CatchUp.RECOVER,
        update.catch_up is CatchUp.BEGIN,
    )
    if update.snapshot is not None and update.catch_up in (
        CatchUp.RECOVER,
        CatchUp.RESTORE,
    ):
        response.restore.version, response.restore.index = (
            update.snapshot.version,
            update.snapshot.index,
        )
        response.restore.manifest_json = update.snapshot.as_json()
    if update.catch_up in (CatchUp.BEGIN, CatchUp.ADOPT):
        model = ""  # the shard discards its model
    if update.model is not None and update.model.fingerprint() != model:
        model = update.model.fingerprint()
        response.model.CopyFrom(model_to_proto(update.model))
    return response, update.cursor, model


class ShardListener(threading.Thread):
    """Reads the messages of one shard until its stream ends."""

    def __init__(
        self,
        service: CoordinatorService,
        server: ServerEntry,
        connection: int,
        requests: Iterator[pb.LinkShardRequest],
    ) -> None:
        super().__init__(name=f"listen-to-shard-{server.shard}", daemon=True)
        self._service = service
        self._server, self._connection = server, connection
        self._requests = requests
        self._waiting_since: float | None = None

    @property
    def silent(self) -> float:
        """Seconds that this thread has waited for a message; a shard sends one every second.

        Handling a message does not count: a report can trigger a long update in this thread.
        """
        since = self._waiting_since
        return time.monotonic() - since if since is not None else 0.0

    def run(self) -> None:
        # RpcError: the shard's process ended; its next stream starts over
        with contextlib.suppress(grpc.RpcError):
            for request in self._requests:
                self.handle(request)

    def handle(self, request: pb.LinkShardRequest) -> None:
        """Handle one message of the shard."""
        self._waiting_since = None
        self._carry_out(request)
        self._waiting_since = time.monotonic()

    def _carry_out(self, request: pb.LinkShardRequest) -> None:
        service, shard = self._service, self._server.shard
        self._server.place = request.place
        if request.ended:
            service.worker_exits.found(request.ended)
        if request.alive:
            service.worker_requests.renew_leases(request.alive)
        if request.stats_json:
            self._server.stats = json.loads(request.stats_json)
        if request.HasField("restored"):
            service.shard_connections.finish_catch_up(
                self._server, self._connection, request.restored.version, request.restored.problem
            )
        if request.HasField("snapshot_part"):
            part = request.snapshot_part
            named = (part.version, part.index, part.file, part.nbytes, part.sha256, part.problem)
            service.shard_connections.record_part(shard, PartReport(*named))
        if request.HasField("moved"):
            service.reshard_requests.partition_built(
                shard, request.moved.nbytes, request.moved.problem
            )
        if request.HasField("report"):
            self._server.standby = request.standby
            service.shard_connections.report(
                report_from_proto(shard, request.report), self._server, self._connection
            )
