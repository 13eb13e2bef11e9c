"""Connect a shard to the coordinator: send reports, receive log entries, reconnect."""

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import grpc

from pscommon.core.errors import (
    MismatchError,
    PSError,
    SnapshotError,
    TakenError,
    UnreachableError,
)
from pscommon.core.formats import check_wire_format, spoken_format
from pscommon.optim import digest_of_user_defined
from pscommon.snapshot import Manifest
from pscommon.system.process_id import pid_namespace
from pscommon.telemetry.logs import get_logger
from pscommon.wire.channel import open_channel
from pscommon.wire.messages import entry_from_proto, model_from_proto, report_to_proto
from pscommon.wire.status import error_from
from psproto.v1 import coordinator_pb2 as pb
from psproto.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from psserver.core.job.settings import GradientRules
from psserver.core.job.snapshot_schedule import PartReport
from psserver.durability.record_sink import StandbyLink
from psserver.durability.shard_recovery import ShardStateFactory
from psserver.durability.shard_state import LogUnfitError
from psserver.durability.snapshots import SnapshotManager
from psserver.process.identity import ServerIdentity
from psserver.process.worker_exits import WorkerExits
from psserver.shard.engine import ShardEngine
from psserver.shard.resharding import build_partition

REPORT_INTERVAL_SECONDS = 1.0
"""Seconds between reports when nothing happens."""
PROCESS_CHECK_INTERVAL_SECONDS = 0.2
"""Seconds between checks of worker processes on this host that shard 0 cannot see."""
RETRY_INTERVAL_SECONDS = 0.2
"""Seconds before the next attempt after a lost connection."""
WAIT_LOG_INTERVAL_SECONDS = 8.0
"""Seconds between log lines that say what this shard waits for."""

log = get_logger(__name__)


class CoordinatorLink:
    """Keeps a shard connected to the coordinator, in its own thread.

    statistics: returns this shard's part of the status.
    timeout_seconds: time without contact after which the shard gives up.
    standby: the link to this shard's standby.
    has_log: whether this shard writes a log.
    stopped: set when the coordinator ends the job or refuses this shard, or the link gives up.
    failure: why the link ended, if the job did not end.
    is_over: whether the coordinator has ended the job.
    """

    not_saved = ""  # only shard 0 saves the final weights

    def __init__(
        self,
        identity: ServerIdentity,
        engine: ShardEngine,
        states: ShardStateFactory,
        snapshots: SnapshotManager,
        statistics: Callable[[], dict[str, object]],
        timeout_seconds: float,
        standby: StandbyLink,
        has_log: bool = False,
    ) -> None:
        self.stopped = threading.Event()
        self.failure: PSError | None = None
        self._identity, self._engine = identity, engine
        self._states, self._snapshots = states, snapshots
        self._statistics = statistics
        self._timeout_seconds = timeout_seconds
        self._standby = standby
        self._has_log = has_log
        self._optimizer_digest = digest_of_user_defined()
        self._addresses: dict[str, None] = {}  # possible addresses of shard 0, in order
        self._term = 0  # the highest term of a coordinator so far
        self.is_over = self._is_leaving = self._is_connected = False
        self._waiting_for = "shard 0"
        self._last_contact = self._last_logged = 0.0
        self._wakeup = threading.Event()
        self._outbox: deque[pb.LinkShardRequest] = deque()  # of the current stream
        self._outbox_lock = threading.Lock()
        self._exits = WorkerExits()
        self._worker_processes: dict[int, str] = {}
        self._last_part: pb.LinkShardRequest | None = None
        self._call: object = None
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    def start(self) -> None:
        self._engine.request_report = self._wakeup.set
        self._engine.describe_wait = lambda: self._waiting_for
        self._snapshots.on_part = self._send_part
        self._thread.start()

    def leave(self, seconds: float) -> None:
        """End when the connection to shard 0 ends, at the latest after `seconds`.

        Shard 0's last snapshot needs a part of this shard.
        """
        self._is_leaving = True
        if not self._is_connected:
            self.stopped.set()
        timer = threading.Timer(seconds, self.stopped.set)
        timer.daemon = True
        timer.start()

    def close(self) -> None:
        self.stopped.set()
        self._wakeup.set()
        if isinstance(self._call, grpc.Call):
            self._call.cancel()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._stay_connected()
        except Exception as bug:
            log.exception("coordinator_link_failed")
            self._fail(PSError(f"a bug: {bug!r}"))

    def _stay_connected(self) -> None:
        self._last_contact = self._last_logged = time.monotonic()
        while (
            not (address := self._identity.wait_for_coordinator(REPORT_INTERVAL_SECONDS))
            and not self.stopped.is_set()
        ):
            self._handle_silence(
                "shard 0",
                "its address is unknown: give `--join`, or let a worker list all servers",
            )
        self._last_contact = self._last_logged = time.monotonic()
        while not self.stopped.is_set():
            try:
                if self._run_stream(address):
                    self._last_contact = self._last_logged = time.monotonic()
            except (MismatchError, TakenError) as error:
                self._fail(error)
                return
            except PSError as error:
                self._handle_silence(f"shard 0 at {address}", str(error))
            self._is_connected = False
            if self._is_leaving:
                self.stopped.set()
            self._waiting_for = f"shard 0 at {address}"
            address = self._next_address(address)
            self.stopped.wait(RETRY_INTERVAL_SECONDS)

    def _next_address(self, address: str) -> str:
        """Return the next address to try: shard 0 may have failed over, or failed back."""
        identity = self._identity
        self._remember_addresses(
            address, identity.coordinator, *identity.standbys[:1], identity.coordinator_hint
        )
        addresses = list(self._addresses)
        return addresses[(addresses.index(address) + 1) % len(addresses)]

    def _remember_addresses(self, *addresses: str) -> None:
        self._addresses.update(dict.fromkeys(filter(None, addresses)))

    def _handle_silence(self, waiting_for: str, problem: str) -> None:
        """Log now and then that nothing answers; give up after the timeout."""
        now = time.monotonic()
        silent = now - self._last_contact
        if silent >= self._timeout_seconds:
            self._fail(UnreachableError(f"{waiting_for}: nothing for {silent:.0f} s: {problem}"))
        elif now - self._last_logged >= WAIT_LOG_INTERVAL_SECONDS:
            self._last_logged = now
            log.info(
                "waiting_for_coordinator",
                waiting_for=waiting_for,
                seconds=round(silent),
                problem=problem,
            )

    def _fail(self, error: PSError) -> None:
        self.failure = error
        self.stopped.set()

    def _run_stream(self, address: str) -> bool:
        """Run one stream, from connecting to its end. Return whether it connected."""
        connected = False
        self._reset_outbox()
        with contextlib.closing(open_channel(address)) as channel:
            call = CoordinatorServiceStub(channel).LinkShard(self._requests(self._outbox))
            self._call = call
            try:
                for response in call:
                    check_wire_format(response.format, f"shard 0 at {address}", "this shard")
                    if not connected:
                        log.info("coordinator_connected", coordinator=address, job=response.job)
                        self._check_durable(response)
                    if response.term < self._term:
                        raise UnreachableError(
                            f"shard 0 at {address} is no longer primary", "NOT_PRIMARY"
                        )
                    connected = self._is_connected = True
                    self._term = response.term
                    self._identity.find(address)  # told to workers and to this shard's standby
                    self._handle_response(response)
            except grpc.RpcError as failure:
                self._handle_disconnect(
                    error_from(failure, f"shard 0 at {address}"), address, connected
                )
        return connected

    def _check_durable(self, response: pb.LinkShardResponse) -> None:
        """Log an error if only shard 0 writes a log: a crash of this shard would lose updates."""
        if response.durable and not self._has_log:
            log.error(
                "shard_log_missing",
                problem="shard 0 writes a log, this shard does not: its crash causes a rollback",
                remedy="start it with --durability log and a --data-dir",
            )

    def _reset_outbox(self) -> None:
        """Start another stream's outbox with the messages that are still to be sent.

        gRPC may read on for a moment after a stream ends; it must not take the next one's messages.
        """
        with self._outbox_lock:
            # the last part may have been lost on its way: it is sent again
            last = [self._last_part] if self._last_part is not None else []
            others = (message for message in self._outbox if message is not self._last_part)
            self._outbox = deque([*others, *last])

    def _send(self, request: pb.LinkShardRequest) -> None:
        with self._outbox_lock:
            self._outbox.append(request)
        self._wakeup.set()

    def _handle_disconnect(self, error: PSError, address: str, connected: bool) -> None:
        """Raise the error if there was no connection; a connection that worked is opened again."""
        if self.stopped.is_set() or self._is_leaving:
            return
        if not connected:
            raise error
        log.warning(
            "coordinator_connection_lost",
            coordinator=address,
            problem=str(error),
            version=self._engine.live.version,
        )

    def _requests(self, outbox: deque[pb.LinkShardRequest]) -> Iterator[pb.LinkShardRequest]:
        """Yield a report now, at every change and every interval, until this stream is replaced."""
        last_statistics, standby = 0.0, ""
        while not self.stopped.is_set() and outbox is self._outbox:
            self._wakeup.clear()
            while outbox:
                yield self._request(outbox.popleft())
            request = pb.LinkShardRequest()
            # a change of the standby's state is reported at once
            if (
                time.monotonic() - last_statistics >= REPORT_INTERVAL_SECONDS
                or standby != self._standby.state
            ):
                last_statistics, standby = time.monotonic(), self._standby.state
                request.stats_json = json.dumps(self._statistics())
                request.alive.update(self._engine.traffic.transfer.take_active_workers())
            request.report.CopyFrom(report_to_proto(self._engine.make_report()))
            request.ended.extend(self._exits.among(self._worker_processes))
            yield self._request(request)
            self._wakeup.wait(
                PROCESS_CHECK_INTERVAL_SECONDS
                if self._worker_processes
                else REPORT_INTERVAL_SECONDS
            )

    def _request(self, request: pb.LinkShardRequest) -> pb.LinkShardRequest:
        identity = self._identity
        request.shard, request.shards, request.address = (
            identity.shard,
            identity.shards,
            identity.address,
        )
        request.instance, request.job = identity.instance, identity.only_job
        request.optimizers = self._optimizer_digest
        if (spoken := spoken_format()) is not None:
            request.format = spoken
        request.term, request.standby, request.place = (
            self._standby.term,
            self._standby.address,
            pid_namespace(),
        )
        return request

    def _send_part(self, part: PartReport) -> None:
        message = pb.SnapshotPart(
            version=part.version,
            index=part.cut,
            file=part.file,
            nbytes=part.nbytes,
            sha256=part.sha256,
            problem=part.problem,
        )
        self._last_part = pb.LinkShardRequest(snapshot_part=message)
        self._send(self._last_part)

    def _handle_response(self, response: pb.LinkShardResponse) -> None:
        self._identity.standbys = response.standbys
        # also one that is lost now: it may be back when it is needed
        self._remember_addresses(*response.standbys[:1])
        self._waiting_for = response.waiting_for
        self._worker_processes = dict(response.processes)
        for worker, process in self._worker_processes.items():
            self._exits.learn(worker, process)
        if response.addresses:  # else the job does not use this shard, yet or any longer
            self._apply_response(response)
        if response.stop:
            self.is_over = True
            self.stopped.set()
            self._wakeup.set()

    def _apply_response(self, response: pb.LinkShardResponse) -> None:
        self._identity.learn(response.job, response.addresses, response.layout)
        self._identity.policy = response.policy
        self._engine.gradient_rules = GradientRules(response.mends, response.norms)
        if response.recover or response.HasField("restore"):
            self._restore(response)
        elif response.begin:
            self._last_part = None  # it belongs to the log that ended
            self._engine.install(self._states.fresh(response.epoch, response.base, response.shards))
            self._wakeup.set()
        elif response.move.state_json:
            state, model = json.loads(response.move.state_json), model_from_proto(response.model)
            self._engine.install(
                self._states.joining(response.epoch, state, model, response.shards)
            )
            self._wakeup.set()
        if response.HasField("model"):
            self._engine.set_model(model_from_proto(response.model))
        if response.entries:
            self._engine.deliver(
                response.epoch, [entry_from_proto(entry) for entry in response.entries]
            )
        if (
            response.HasField("move")
            and self._engine.live.is_resharding
            and self._identity.shard < response.shards
        ):
            self._build_partition(response.epoch, response.move)
        elif not response.HasField("move"):
            self._engine.live.discard_frozen()
        if response.snapshots:
            self._snapshots.retain(response.snapshots, response.job)
            self._engine.retire_log(max(response.snapshots))

    def _build_partition(self, log_id: int, reshard: pb.Move) -> None:
        """Build this shard's new partition. After a failure the next response tries again."""
        identity = self._identity
        nbytes, problem = build_partition(
            self._engine, reshard.sources, identity.job, log_id, reshard.index
        )
        result = pb.MoveResult(index=reshard.index, nbytes=nbytes, problem=problem)
        self._send(pb.LinkShardRequest(moved=result))

    def _restore(self, response: pb.LinkShardResponse) -> None:
        """Load a snapshot, or recover this shard's state from before a crash."""
        has_snapshot, problem = response.HasField("restore"), ""
        manifest = Manifest.from_json(response.restore.manifest_json) if has_snapshot else None
        try:
            if response.recover:
                before = [len(response.move.sources)] if response.HasField("move") else []
                possible_shards = {response.shards, *before}
                state = self._states.from_log(response.epoch, manifest, possible_shards)
            else:
                assert manifest is not None
                self._last_part = None  # it belongs to the log that ended
                state = self._states.from_snapshot(response.epoch, manifest, response.shards)
            self._engine.install(state, continues_log=response.recover)
        except (LogUnfitError, SnapshotError) as error:
            problem = str(error)
        result = pb.RestoreResult(version=manifest.version if manifest else 0, problem=problem)
        self._send(pb.LinkShardRequest(restored=result))
