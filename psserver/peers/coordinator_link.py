"""Connect a shard to the coordinator: send reports, receive log entries, reconnect."""

import contextlib
import json
import threading
import time
from collections.abc import Callable
from functools import partial

from pscommon.core.errors import (
    AuthenticationError,
    MismatchError,
    PSError,
    SnapshotError,
    TakenError,
    UnreachableError,
)
from pscommon.core.formats import check_wire_format
from pscommon.settings.values import Lanes
from pscommon.snapshot import Manifest
from pscommon.telemetry.logs import get_logger
from pscommon.tracing.recorder import server_spans
from pscommon.wire.messages import entry_from_proto, model_from_proto
from pscommon.wire.tls_probe import cause_of
from psproto.v1 import coordinator_pb2 as pb
from psserver.core.job.settings import GradientRules
from psserver.core.job.snapshot_schedule import PartReport
from psserver.durability.record_sink import StandbyLink
from psserver.durability.shard_recovery import ShardStateFactory
from psserver.durability.shard_state import LogUnfitError
from psserver.durability.snapshots import SnapshotManager
from psserver.peers.link_calls import GrpcLink, LinkEndedError, SocketLink, open_link
from psserver.peers.link_messages import ShardMessages
from psserver.peers.resharding import build_partition
from psserver.process.identity import ServerIdentity
from psserver.shard.engine import Coordinator, ShardEngine

SEARCH_INTERVAL_SECONDS = 1.0
"""Seconds between looks for the address of shard 0."""
RETRY_INTERVAL_SECONDS = 0.2
"""Seconds before the next attempt after a lost connection."""
REFUSAL_TIMEOUT_SECONDS = 10.0
"""Seconds in which shard 0 has to end a job that this shard has refused."""
WAIT_LOG_INTERVAL_SECONDS = 8.0
"""Seconds between log lines that say what this shard waits for."""

log = get_logger(__name__)


class CoordinatorLink:
    """Keeps a shard connected to the coordinator, in its own thread.

    make_engine: returns the shard, which asks the coordinator that it is given.
    standby_link: the link to this shard's standby.
    timeout_seconds: time without contact after which the shard gives up.
    has_log: whether this shard writes a log.
    lanes: the transports that may carry the connection.
    store_job_key: stores the job's key for a later start of this process.
    stopped: set when the coordinator ends the job or refuses this shard, or the link gives up.
    engine: the shard.
    failure: why the link ended, if the job did not end.
    is_over: whether the coordinator has ended the job.
    """

    not_saved = ""  # only shard 0 saves the final weights

    def __init__(
        self,
        identity: ServerIdentity,
        make_engine: Callable[[Coordinator], ShardEngine],
        states: ShardStateFactory,
        snapshots: SnapshotManager,
        standby_link: StandbyLink,
        timeout_seconds: float,
        has_log: bool = False,
        lanes: Lanes = "grpc",
        store_job_key: Callable[[bytes], None] = lambda key: None,
    ) -> None:
        self.stopped = threading.Event()
        self.failure: PSError | None = None
        self.engine = make_engine(self)
        self._messages = ShardMessages(identity, self.engine, standby_link)
        self._identity, self._states, self._snapshots = identity, states, snapshots
        self._timeout_seconds = timeout_seconds
        self._has_log, self._lanes, self._store_job_key = has_log, lanes, store_job_key
        self._key_of_state = identity.worker_keys.job_key  # of the job whose state this shard holds
        self._addresses: dict[str, None] = {}  # possible addresses of shard 0, in order
        self._term = 0  # the highest term of a coordinator so far
        self.is_over = self._is_leaving = self._is_connected = self._is_refusing = False
        self._waiting_for = "shard 0"
        self._last_contact = self._last_logged = 0.0
        self._link: GrpcLink | SocketLink | None = None
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    def start(self) -> None:
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
        self._messages.wakeup.set()
        if self._link is not None:
            self._link.cancel()
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
            not (address := self._identity.wait_for_coordinator(SEARCH_INTERVAL_SECONDS))
            and not self.stopped.is_set()
        ):
            self._handle_silence(
                "shard 0",
                lambda: "its address is unknown: give `--join`, or let a worker list all servers",
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
                # a silent server takes a second to ask: after the first contact only for the log
                problem = error if self._term else cause_of(error, address)
                if isinstance(problem, AuthenticationError) and not self._term:
                    self._fail(problem)  # it was accepted never before
                    return
                self._handle_silence(f"shard 0 at {address}", partial(cause_of, problem, address))
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

    def _handle_silence(self, waiting_for: str, find_problem: Callable[[], object]) -> None:
        """Log now and then that nothing answers, and why; give up after the timeout."""
        now = time.monotonic()
        silent = now - self._last_contact
        if silent >= self._timeout_seconds:
            self._fail(
                UnreachableError(f"{waiting_for}: nothing for {silent:.0f} s: {find_problem()}")
            )
        elif now - self._last_logged >= WAIT_LOG_INTERVAL_SECONDS:
            self._last_logged = now
            log.info(
                "waiting_for_coordinator",
                waiting_for=waiting_for,
                seconds=round(silent),
                problem=str(find_problem()),
            )

    def _fail(self, error: PSError) -> None:
        self.failure = error
        self.stopped.set()

    def _run_stream(self, address: str) -> bool:
        """Run one stream, from connecting to its end. Return whether it connected."""
        connected = False
        with contextlib.closing(open_link(address, self._lanes)) as link:
            self._link = link
            try:
                for response in link.follow(self._messages.begin(self._is_open, link.sends_news)):
                    if not connected:
                        check_wire_format(response.format, f"shard 0 at {address}", "this shard")
                        log.info("coordinator_connected", coordinator=address, job=response.job)
                        self._check_durable(response)
                    if response.term < self._term:
                        raise UnreachableError(
                            f"shard 0 at {address} is no longer primary", "NOT_PRIMARY"
                        )
                    connected = self._is_connected = True
                    self._term = response.term
                    if response.only_entries:
                        self._deliver(response)
                    else:
                        self._identity.find(address)  # told to workers and this shard's standby
                        self._handle_response(response)
            except LinkEndedError as ended:
                self._handle_disconnect(ended.error, address, connected)
        return connected

    def _is_open(self) -> bool:
        return not self.stopped.is_set()

    def _check_durable(self, response: pb.LinkShardResponse) -> None:
        """Log an error if only shard 0 writes a log: a crash of this shard would lose updates."""
        if response.durable and not self._has_log:
            log.error(
                "shard_log_missing",
                problem="shard 0 writes a log, this shard does not: its crash causes a rollback",
                remedy="start it with --durability log and a --data-dir",
            )

    # ---- asked by the shard (psserver.shard.engine.Coordinator) ----------------------------------

    def request_report(self) -> None:
        """Send a report, from this thread if that needs no waiting."""
        link = self._link
        try:
            if (
                link is not None
                and self._is_connected
                and link.try_send_message(self._messages.make_news)
            ):
                return
        except OSError as error:
            log.debug("report_unsent", problem=str(error))  # the connection is lost
        self._messages.wakeup.set()

    def record_part(self, part: PartReport) -> None:
        self._messages.send_part(part)

    def describe_wait(self) -> str:
        return self._waiting_for

    # ---- what shard 0 sends ----------------------------------------------------------------------

    def _handle_disconnect(self, error: PSError, address: str, connected: bool) -> None:
        """Raise the error if there was no connection; a connection that worked is opened again."""
        if self.stopped.is_set() or self._is_leaving:
            return
        if not connected:
            raise error
        version = self.engine.live.version
        if error.reason == "STOPPING":
            log.info("coordinator_stops", coordinator=address, reason=str(error), version=version)
        else:
            log.warning(
                "coordinator_connection_lost",
                coordinator=address,
                problem=str(error),
                version=version,
            )

    def _handle_response(self, response: pb.LinkShardResponse) -> None:
        if response.echo:
            self._messages.clock_offset.add(response.echo, time.monotonic(), response.clock)
        server_spans.set_wanted(response.trace)
        self._identity.standbys = response.standbys
        # also one that is lost now: it may be back when it is needed
        self._remember_addresses(*response.standbys[:1])
        if response.job_key:
            self._identity.worker_keys.learn(response.job_key)
        self._waiting_for = response.waiting_for
        self._messages.watch_workers(response.processes)
        # without addresses the job does not use this shard, yet or any longer
        if response.addresses and not self._refuses(response):
            self._apply_response(response)
        if response.stop:
            self.is_over = True
            self.stopped.set()
            self._messages.wakeup.set()

    def _deliver(self, response: pb.LinkShardResponse) -> None:
        self.engine.deliver(response.epoch, [entry_from_proto(entry) for entry in response.entries])

    def _refuses(self, response: pb.LinkShardResponse) -> bool:
        """Return whether this shard refuses to begin a new job in place of the one that it holds.

        A shard 0 that begins a job with another key has lost its data directory. It then ends.
        """
        if self._is_refusing:
            return True
        newest = self._snapshots.newest_part() if response.begin and self._key_of_state else None
        if newest is not None and response.job_key != self._key_of_state:
            self._is_refusing = True
            shard = self._identity.shard
            self.failure = SnapshotError(
                f"shard 0 begins a new job, as it has lost its data directory; shard {shard} has "
                f"version {newest} of the old job. Try: start shard 0 with its old directory, or "
                "all servers with `--resume never` to start over"
            )
            result = pb.RestoreResult(problem=str(self.failure))
            self._messages.send(pb.LinkShardRequest(restored=result))
            self.leave(REFUSAL_TIMEOUT_SECONDS)
        is_current = response.begin or response.recover or response.entries
        if (
            not self._is_refusing
            and (is_current or response.HasField("restore"))
            and response.job_key != self._key_of_state
        ):
            self._key_of_state = response.job_key
            self._store_job_key(response.job_key)
        return self._is_refusing

    def _apply_response(self, response: pb.LinkShardResponse) -> None:
        self._identity.learn(response.job, response.addresses, response.layout)
        self._identity.policy = response.policy
        self.engine.gradient_rules = GradientRules(response.mends, response.norms)
        if response.recover or response.HasField("restore"):
            self._restore(response)
        elif response.begin:
            self._messages.forget_part()
            self.engine.install(self._states.fresh(response.epoch, response.base, response.shards))
            self._messages.wakeup.set()
        elif response.move.state_json:
            state, model = json.loads(response.move.state_json), model_from_proto(response.model)
            self.engine.install(self._states.joining(response.epoch, state, model, response.shards))
            self._messages.wakeup.set()
        if response.HasField("model"):
            self.engine.set_model(model_from_proto(response.model))
        if response.entries:
            self._deliver(response)
        if (
            response.HasField("move")
            and self.engine.live.is_resharding
            and self._identity.shard < response.shards
        ):
            self._build_partition(response.epoch, response.move)
        elif not response.HasField("move"):
            self.engine.live.discard_frozen()
        if response.snapshots:
            self._snapshots.retain(response.snapshots, response.job)
            self.engine.log.remove_before(max(response.snapshots))

    def _build_partition(self, log_id: int, reshard: pb.Move) -> None:
        """Build this shard's new partition. After a failure the next response tries again."""
        identity = self._identity
        nbytes, problem = build_partition(
            self.engine, reshard.sources, identity.job, log_id, reshard.index
        )
        result = pb.MoveResult(index=reshard.index, nbytes=nbytes, problem=problem)
        self._messages.send(pb.LinkShardRequest(moved=result))

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
                self._messages.forget_part()
                state = self._states.from_snapshot(response.epoch, manifest, response.shards)
            self.engine.install(state, continues_log=response.recover)
            self.failure = None
        except (LogUnfitError, SnapshotError) as error:
            problem = str(error)
            # the job ends with it, unless another snapshot can be loaded
            self.failure = error if isinstance(error, SnapshotError) else None
        result = pb.RestoreResult(version=manifest.version if manifest else 0, problem=problem)
        self._messages.send(pb.LinkShardRequest(restored=result))
