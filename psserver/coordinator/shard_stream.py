"""The stream between shard 0 and another shard: updates go to the shard, its reports come back.

It translates messages and decides nothing (proto/psproto/v1/coordinator.proto: LinkShard).
"""

import json
import threading
import time
from collections.abc import Callable, Iterator

from pscommon.core.formats import check_wire_format, spoken_format
from pscommon.core.model_spec import ModelSpec
from pscommon.optim import check_same_optimizers
from pscommon.wire.messages import entry_to_proto, model_to_proto, report_from_proto
from psproto.v1 import coordinator_pb2 as pb
from psserver.coordinator.service import CoordinatorService
from psserver.core.job.snapshot_schedule import PartReport
from psserver.core.servers.catch_up import CatchUp
from psserver.core.servers.server_entry import DeliveryCursor, ServerEntry
from psserver.core.shard.state_machine import NO_LOG

MakeResponse = Callable[[], pb.LinkShardResponse | None]

UPDATE_INTERVAL_SECONDS = 1.0
MAX_SILENCE_SECONDS = 2.5
"""A shard that sends nothing for this long has lost its connection."""


def serve_shard(
    service: CoordinatorService,
    requests: Iterator[pb.LinkShardRequest],
    is_active: Callable[[], bool],
    when_ended: Callable[[Callable[[], None]], None],
    try_send: Callable[[MakeResponse], bool] | None = None,
) -> Iterator[MakeResponse]:
    """Connect a shard, and yield its updates, while another thread reads its messages.

    An update can be None: there is nothing to send.

    Args:
        requests: The messages of the shard; ends with the connection.
        is_active: Returns whether the connection is open.
        when_ended: Registers what to do as soon as the connection ends.
        try_send: Makes and sends a response without waiting; returns whether that was possible. If
            there is such a function, both sides send only what has changed, and everything once a
            second. Otherwise they always send everything, as earlier releases did.

    Raises:
        UnreachableError: STOPPING once this server ends on its own and needs no report any more.
    """
    first = next(requests, None)
    if first is None:
        return  # the connection ended without a message
    check_wire_format(first.format, f"shard {first.shard}", "shard 0")
    service.check_job(first.job)
    check_same_optimizers(f"shard {first.shard}", first.optimizers, "shard 0")
    followed, term = first.report.epoch != NO_LOG, max(1, first.term)
    connections = service.shard_connections
    server, connection = connections.connect(
        first.shard, first.shards, first.address, first.instance, followed, term
    )
    # at once, not at the next check of the loop below: the shard's next process may connect
    when_ended(lambda: connections.disconnect(server, connection))
    updates = ShardUpdates(service, server, first, try_send)
    listener = ShardListener(service, server, connection, requests, updates.note_clock)
    try:
        listener.handle(first)
        listener.start()
        with (
            service.executor.announcing(updates.send_news),
            service.executor.watch_all(updates.request_complete),
        ):
            while (
                is_active()
                and listener.is_alive()
                and listener.silent < MAX_SILENCE_SECONDS
                and server.connection == connection
                and not updates.has_stopped
            ):
                yield updates.next_response
                updates.wait()
                if not updates.has_stopped:
                    service.check_running()  # the shard learns that this end was intended
    finally:
        connections.disconnect(server, connection)


class ShardUpdates:
    """What to send to one shard. One thread at a time makes and sends a response.

    Attributes:
        has_stopped: The last response tells the shard to stop.
    """

    def __init__(
        self,
        service: CoordinatorService,
        server: ServerEntry,
        first: pb.LinkShardRequest,
        try_send: Callable[[MakeResponse], bool] | None,
    ) -> None:
        """first: The shard's first message. try_send: As in `serve_shard`."""
        self.has_stopped = False
        self._service, self._server, self._try_send = service, server, try_send
        self._has_work = threading.Event()
        self._is_complete_due = True
        self._cursor = DeliveryCursor(first.report.epoch, first.report.index)
        self._model: ModelSpec | None = None  # the model that the shard has
        self._complete_at = 0.0  # time of the last complete response
        self._clock: tuple[float, float] | None = None  # the shard's, and this one's then

    def wait(self) -> None:
        """Wait until there may be something new for the shard."""
        if not (self.has_stopped or self._service.stopped.is_set()):
            age = time.monotonic() - self._complete_at
            self._has_work.wait(max(0.0, UPDATE_INTERVAL_SECONDS - age))

    def note_clock(self, clock: float) -> None:
        """Echo the shard's clock in the next complete response."""
        self._clock = clock, time.monotonic()

    def request_complete(self) -> None:
        """Ask for a complete response. Never waits."""
        self._is_complete_due = True
        self._has_work.set()

    def send_news(self) -> None:
        """Send new log entries, or leave it to the thread that serves the shard. Never waits."""
        if self._try_send is None or not self._try_send(self._next_news):
            self._has_work.set()

    def next_response(self) -> pb.LinkShardResponse | None:
        """Return a complete response if it is due, else the news; None if there is none."""
        self._has_work.clear()
        age = time.monotonic() - self._complete_at
        if self._try_send is None or self._is_complete_due or age >= UPDATE_INTERVAL_SECONDS:
            return self._complete_response()
        return self._next_news()

    def _next_news(self) -> pb.LinkShardResponse | None:
        """Return new log entries; None if there are none, or the shard needs more than them."""
        service = self._service
        news = service.shard_connections.next_entries(self._server, self._cursor, self._model)
        if news is None:
            self.request_complete()
            return None
        cursor, entries = news
        if not entries:
            return None
        self._cursor = cursor
        return pb.LinkShardResponse(
            only_entries=True,
            epoch=self._cursor.log_id,
            entries=[entry_to_proto(entry) for entry in entries],
            term=service.directory[0].term,
        )

    def _complete_response(self) -> pb.LinkShardResponse:
        self._is_complete_due, self._complete_at = False, time.monotonic()
        response = self._describe_update()
        self.has_stopped = response.stop
        response.format, response.job_key = spoken_format(), self._service.worker_keys.job_key
        response.trace, response.clock = self._service.tracing.is_wanted, time.monotonic()
        if self._clock is not None:
            (clock, at), self._clock = self._clock, None
            response.echo = clock + response.clock - at
        return response

    def _describe_update(self) -> pb.LinkShardResponse:
        service, server = self._service, self._server
        update = service.shard_connections.next_update(server, self._cursor)
        is_over, durable = (
            service.is_over and service.stopped.is_set(),
            service.config.durability == "log",
        )
        if update is None:
            stop = server.is_leaving or is_over
            # a candidate needs them: a standby may be disconnected when the reshard starts
            directory = service.directory
            waits = pb.LinkShardResponse(
                job=service.job,
                stop=stop,
                waiting_for="ps-ctl reshard",
                standbys=directory.standbys,
            )
            waits.term, waits.durable = directory[0].term, durable
            return waits
        response = pb.LinkShardResponse(
            job=service.job,
            addresses=update.addresses,
            waiting_for=service.waiting_for,
            stop=is_over,
            epoch=update.cursor.log_id,
            base=update.base,
            entries=[entry_to_proto(entry) for entry in update.entries],
            snapshots=update.snapshots,
            term=service.directory[0].term,
            standbys=update.standbys,
            shards=update.shards,
            layout=update.reshard_count,
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
            self._model = None  # the shard discards its model
        if update.model is not None and update.model is not self._model:
            self._model = update.model
            response.model.CopyFrom(model_to_proto(update.model))
        self._cursor = update.cursor
        return response


class ShardListener(threading.Thread):
    """Reads the messages of one shard until its stream ends."""

    def __init__(
        self,
        service: CoordinatorService,
        server: ServerEntry,
        connection: int,
        requests: Iterator[pb.LinkShardRequest],
        note_clock: Callable[[float], None],
    ) -> None:
        super().__init__(name=f"listen-to-shard-{server.shard}", daemon=True)
        self._service = service
        self._server, self._connection = server, connection
        self._requests, self._note_clock = requests, note_clock
        self._waiting_since: float | None = None

    @property
    def silent(self) -> float:
        """Seconds that this thread has waited for a message; a shard sends one every second.

        Handling a message does not count: a report can trigger a long update in this thread.
        """
        since = self._waiting_since
        return time.monotonic() - since if since is not None else 0.0

    def run(self) -> None:
        for request in self._requests:
            self.handle(request)

    def handle(self, request: pb.LinkShardRequest) -> None:
        """Handle one message of the shard."""
        self._waiting_since = None
        service, shard = self._service, self._server.shard
        # a former primary may send on its connection what no longer describes the shard
        is_current = self._server.connection == self._connection
        if request.instance and is_current:
            self._server.place, self._server.standby = request.place, request.standby
        if request.ended:
            service.worker_exits.found(request.ended)
        if request.clock:
            self._note_clock(request.clock)
        service.tracing.add("shard", shard, request.spans)
        if request.alive:
            service.renew_leases(request.alive)
        if request.stats_json and is_current:
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
            service.shard_connections.report(
                report_from_proto(shard, request.report),
                self._server,
                self._connection,
            )
        self._waiting_since = time.monotonic()
