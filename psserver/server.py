"""One server process: creates, starts and stops everything, in this order."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Never

from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pscommon.core.errors import PSError
from pscommon.core.exit_codes import ExitCode
from pscommon.optim import digest_of_user_defined
from pscommon.snapshot import DataDirLock
from pscommon.system.thread_team import ThreadTeam
from pscommon.telemetry.http import MetricsServer, new_registry
from pscommon.telemetry.logs import get_logger
from pscommon.wire.endpoint import Endpoint, listen_http
from pscommon.wire.frames import add_parameter_server_to_server
from psproto.v1 import coordinator_pb2, parameter_server_pb2, shard_pb2, standby_pb2
from psproto.v1.coordinator_pb2_grpc import add_CoordinatorServiceServicer_to_server
from psproto.v1.shard_pb2_grpc import add_ShardServiceServicer_to_server
from psproto.v1.standby_pb2_grpc import add_StandbyServiceServicer_to_server
from psserver.coordinator.service import CoordinatorService
from psserver.coordinator.servicer import ControlPlaneServicer
from psserver.coordinator.status import statistics
from psserver.core.shard.replication import ReplicationMachine
from psserver.durability.data_formats import check_data_formats
from psserver.durability.record_sink import RecordSink, RecordSource, disk_log
from psserver.durability.shard_log import ShardLog
from psserver.durability.shard_recovery import ShardStateFactory
from psserver.durability.snapshots import SnapshotManager
from psserver.durability.state_records import StateRecord, StateRecordKind, about, job_state
from psserver.exchange.servicer import DataPlaneServicer
from psserver.peers.coordinator_link import CoordinatorLink
from psserver.peers.link_messages import ShardMessages
from psserver.peers.peer_servicer import PeerServicer
from psserver.process.config import MAX_CONCURRENT_CALLS, ServerConfig
from psserver.process.grpc_server import listen
from psserver.process.identity import ServerIdentity
from psserver.process.job_id_file import JobIdFile, generate_job_name
from psserver.process.metrics import ServerMetrics
from psserver.process.port_file import PortFile, announce
from psserver.process.rpc_metrics import RpcTimer
from psserver.process.shard_count_file import ShardCountFile
from psserver.replication.hello import Hello, shared_settings
from psserver.replication.lease_directory import begin_primary, lease_of
from psserver.replication.primary import PrimaryReplicator
from psserver.replication.servicer import StandbyServicer, make_standby_check
from psserver.replication.standby_state import Promotion
from psserver.shard.engine import ShardEngine
from psserver.shard.worker_traffic import WorkerTraffic
from psserver.stream.listener import StreamListener
from psserver.stream.stream_port import StreamPort, open_stream_port

LAST_SNAPSHOT_TIMEOUT_SECONDS = 8.0
"""Time that a stopping shard waits for the coordinator's last snapshot; containers grant ten
seconds.
"""

PORT_RELEASE_SECONDS = 2.0
"""Time until a port is free after its server has ended."""

STATE_COPY_TIMEOUT_SECONDS = 5.0
"""Time within which a consistent copy for a standby must succeed."""

SERVICES = (
    parameter_server_pb2.DESCRIPTOR.services_by_name["ParameterServerService"].full_name,
    standby_pb2.DESCRIPTOR.services_by_name["StandbyService"].full_name,
    shard_pb2.DESCRIPTOR.services_by_name["ShardService"].full_name,
    coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"].full_name,
)

log = get_logger(__name__)


class Server:
    """A running shard.

    Args:
        promotion: The state of a standby that is primary now; None otherwise.
        stream_port: The open port of that standby; None: the server opens one.

    Raises:
        TakenError, SnapshotError, PSError: The server cannot start.
    """

    def __init__(
        self,
        config: ServerConfig,
        promotion: Promotion | None = None,
        stream_port: StreamPort | None = None,
    ) -> None:
        self.config, self._promotion, self._stream_port = config, promotion, stream_port
        self._port_file, self._resources = PortFile(config.port_file), ExitStack()
        self.service: CoordinatorService | None = None
        try:
            self._build()
        except BaseException:
            self._resources.close()
            raise

    def _build(self) -> None:
        config = self.config
        if config.data_dir is not None:
            self._resources.enter_context(DataDirLock(config.data_dir, config.shard))
            check_data_formats(config.data_dir, config.resume)
        self._registry = new_registry()
        self.metrics = ServerMetrics(self._registry, shard=config.shard)
        self.snapshots = SnapshotManager(
            config.data_dir, config.shard, config.snapshot_keep, self.metrics
        )
        # before the port is bound: a second attempt without this disk needs it
        layout = self._make_layout()
        retry_seconds = PORT_RELEASE_SECONDS if self._promotion is not None else 0.0
        wraps = [RpcTimer(self.metrics.record_call).wrap]
        self._grpc, self.address = listen(config.bind, MAX_CONCURRENT_CALLS, wraps, retry_seconds)
        self._resources.callback(lambda: self._grpc.stop(grace=None))
        self.replicator = self._make_replicator()
        shard_log, team = self._make_log(), ThreadTeam(config.threads or 1)
        self._states = ShardStateFactory(config.shard, team, self.snapshots, shard_log)
        self.engine = ShardEngine(
            self._states.empty(layout.shards),
            WorkerTraffic(self.metrics, config.in_flight, config.lanes),
            self.snapshots.write_part,
            shard_log,
            config.gradient_rules,
        )
        self._resources.callback(self._end)  # when no call is in progress any more
        if self._promotion is not None:
            self.engine.install(self._promotion.standby_state.shard_state)
        self._resources.callback(lambda: self._grpc.stop(grace=0.2).wait())
        self.identity = self._make_identity(layout)
        self.metrics.about = self._about
        self.service = self._make_service(layout) if config.shard == 0 else None
        self.coordinator_link = None if self.service else self._make_coordinator_link()
        self._serve()
        port = self._stream_port or open_stream_port(config, self.address)
        self._streams = StreamListener(
            port, self.engine, self.identity, self.metrics.record_call, self.service
        )
        self._resources.callback(self._streams.close)
        if config.metrics_bind is not None:
            self.monitor = self._make_monitor(config.metrics_bind)
            self._resources.callback(self.monitor.close)

    def _make_layout(self) -> ShardCountFile:
        """Return the number of shards: shard 0 decides, the others learn it from shard 0."""
        config = self.config
        standby_state = self._promotion.standby_state if self._promotion is not None else None
        if config.shard > 0:
            shards = standby_state.shard_state.shards if standby_state else config.shards
            return ShardCountFile(shards, None)
        layout = ShardCountFile(config.shards, config.data_dir)
        # the coordinator decides, so it knows before its shard
        if standby_state is not None and standby_state.coordinator is not None:
            facts = standby_state.hello.facts
            assert facts is not None
            layout.take_over(facts.layout, standby_state.coordinator.shards)
        return layout

    def _make_identity(self, layout: ShardCountFile) -> ServerIdentity:
        config, address = self.config, self.config.advertise or self.address
        hello = self._promotion.standby_state.hello if self._promotion is not None else None
        name = JobIdFile(config.data_dir)
        bound = (hello.job if hello else "") or config.job or name.stored_job
        if config.shard == 0 and hello is None and config.resume != "never":
            name.check(bound)
        job = bound or generate_job_name() if config.shard == 0 else hello.job if hello else ""
        if job:
            # a generated name is stored at once: shard 0 may die before the first snapshot
            name.store(job)
        known = hello.coordinator if hello else ""
        identity = ServerIdentity(
            config.shard, layout.shards, address, config.join or known, job, bound, name
        )
        identity.standbys, identity.coordinator_hint = hello.standbys if hello else (), known
        identity.term = self.replicator.term
        return identity

    def _make_replicator(self) -> PrimaryReplicator:
        config = self.config
        lease = lease_of(config)
        primary_record = (
            self._promotion.primary_record
            if self._promotion is not None
            else begin_primary(config, lease, config.advertise or self.address)
        )
        machine = ReplicationMachine(primary_record, lease, time.monotonic())
        replicator = PrimaryReplicator(machine, self.metrics, self._deposed)
        replicator.copy_state = self._copy_state
        return replicator

    def _copy_state(self, begin: Callable[[Iterable[StateRecord]], None]) -> None:
        """Pass the complete state to `begin`, copied at one moment, for a new standby."""
        with ExitStack() as stack:
            facts, job = (
                stack.enter_context(self.service.paused())
                if self.service is not None
                else (None, None)
            )
            shard = stack.enter_context(self.engine.live.export_state(STATE_COPY_TIMEOUT_SECONDS))
            identity = self.identity
            hello = Hello(
                self.replicator.term,
                identity.job,
                identity.coordinator,
                identity.standbys,
                shared_settings(self.config),
                digest_of_user_defined(),
                facts,
            )
            begin(
                [
                    about(StateRecordKind.HELLO, **hello.as_json()),
                    *shard,
                    *([job_state(job)] if job is not None else []),
                    about(StateRecordKind.LOADED),
                ]
            )

    def _deposed(self, why: str) -> Never:
        """End this process, because it is not primary any more. Nothing more may leave it.

        Args:
            why: The reason; empty if it was planned.
        """
        if why:
            log.error("primary_deposed", problem=why)
        else:
            log.info("primary_replaced")
        self._port_file.remove()
        logging.shutdown()
        os._exit(ExitCode.TAKEN if why else ExitCode.DONE)

    def _make_log(self) -> ShardLog:
        config = self.config
        disk = disk_log(config, f"log-shard-{config.shard}", self.metrics.count_log_failure)
        log = ShardLog(RecordSink(RecordSource.SHARD, disk, self.replicator), config.shard)
        self._resources.callback(log.close)
        return log

    def _end(self) -> None:
        if self.service is not None:
            self.service.end()

    def _about(self) -> dict[str, str]:
        """Return the labels of ps_shard_info, as far as this shard knows them."""
        identity = self.identity
        known = self.service.policy if self.service is not None else identity.policy
        policy = known or self.config.policy
        return {"shards": str(identity.shards), "job": identity.job, "policy": policy}

    def _make_monitor(self, bind: str) -> MetricsServer:
        """Return the metrics endpoint; a promoted standby keeps its own."""
        monitor = self._promotion.monitor if self._promotion is not None else None
        if monitor is None:
            return MetricsServer(listen_http(Endpoint(bind)), self._registry, self.ready)
        monitor.show(self._registry, self.ready)
        return monitor

    def _make_service(self, layout: ShardCountFile) -> CoordinatorService:
        if self._promotion is None:
            if self.config.resume != "never":
                self.snapshots.check_data_dir()
            self.snapshots.generations.count()
        service = CoordinatorService(
            self.config,
            layout,
            self.identity,
            self.engine,
            self._states,
            self.snapshots,
            self.metrics,
            self.replicator,
        )
        self.snapshots.on_part = lambda part: service.shard_connections.record_part(0, part)
        return service

    def _make_coordinator_link(self) -> CoordinatorLink:
        return CoordinatorLink(
            self.identity,
            self.engine,
            self._states,
            self.snapshots,
            ShardMessages(
                self.identity,
                self.engine,
                lambda: statistics(self.engine, self.replicator),
                self.replicator,
            ),
            self.config.join_timeout,
            self.config.durability == "log",
            self.config.lanes,
        )

    def _serve(self) -> None:
        add_parameter_server_to_server(DataPlaneServicer(self.engine, self.identity), self._grpc)
        add_ShardServiceServicer_to_server(
            PeerServicer(self.engine.live, self.identity), self._grpc
        )
        if self.service is not None:
            add_CoordinatorServiceServicer_to_server(ControlPlaneServicer(self.service), self._grpc)
        check = make_standby_check(self.identity)
        add_StandbyServiceServicer_to_server(
            StandbyServicer(self.replicator, None, check), self._grpc
        )
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        names = (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._grpc)

    @property
    def _services(self) -> tuple[str, ...]:
        """Names of the gRPC services; only shard 0 has the coordinator's."""
        return SERVICES if self.service is not None else SERVICES[:-1]

    def start(self) -> None:
        """Continue or begin the job, then answer calls."""
        if self.service is not None:
            self.service.start(promotion=self._promotion)
        else:
            assert self.coordinator_link is not None
            self.coordinator_link.start()
        self.replicator.start()
        self._grpc.start()
        self._streams.start()
        for service in ("", *self._services):
            self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        self._port_file.write(self.address, inherited=self._promotion is not None)
        if self.service is not None:
            self._resources.callback(announce(self.identity.job, self.identity.address))
        # only shard 0 knows the current policy
        policy = {} if self.service is None else {"policy": self.service.policy}
        log.info("listening", address=self.address, shards=self.identity.shards, **policy)

    def ready(self) -> tuple[bool, str]:
        """Answer /readyz: whether workers can train."""
        if self.service is not None:
            waiting = self.service.waiting_for if not self.service.begun else ""
            problem = f"waiting for {waiting}" if waiting else ""
        else:
            problem = "" if self.engine.live.has_begun else "no weights yet"
        return not problem, problem or f"version {self.engine.live.version}"

    @property
    def _job_end(self) -> CoordinatorService | CoordinatorLink:
        """Return what knows how the job ends."""
        job_end = self.service or self.coordinator_link
        assert job_end is not None
        return job_end

    @property
    def ended(self) -> threading.Event:
        """Set once this server may end."""
        return self._job_end.stopped

    @property
    def failure(self) -> PSError | None:
        return self._job_end.failure

    @property
    def not_saved(self) -> str:
        """Why shard 0 did not save the final weights; empty if it did, and on other shards."""
        return self._job_end.not_saved

    @property
    def job_is_over(self) -> bool:
        """Whether the job is over for this server, so that no other server has to replace it."""
        return self._job_end.is_over

    def stop(self, reason: str) -> None:
        """Begin to stop on a signal: shard 0 with a last snapshot, others once their part of it
        is written.

        The job is not over: the other processes wait for this server to return, or continue with
        its standby.
        """
        if self.service is not None:
            self.service.stop(reason, ends_job=False)
        elif self.coordinator_link is not None:
            self.coordinator_link.leave(LAST_SNAPSHOT_TIMEOUT_SECONDS)

    def close(self) -> None:
        """Answer all waiting calls, finish writing, free everything. Repeating it is harmless."""
        self._health.enter_graceful_shutdown()
        self.engine.stop("its process ends")
        if self.coordinator_link is not None:
            self.coordinator_link.close()
        if self.service is not None:
            self.service.close()
        self.snapshots.close()
        self.replicator.close(job_has_ended=self.job_is_over)
        self._resources.close()
        self._port_file.remove()
