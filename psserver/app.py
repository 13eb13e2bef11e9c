"""One server process: everything is made, started and stopped here, in this order."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from types import FrameType
from typing import Never

import torch
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pscommon.core.errors import InvalidRequestError, PSError, SnapshotError, TakenError
from pscommon.core.exit_codes import ExitCode
from pscommon.optim import digest_of_user_defined
from pscommon.snapshot import DataDirLock
from pscommon.system import shared_memory
from pscommon.system import signals as interruptible
from pscommon.system.local_jobs import JobAnnouncement
from pscommon.system.malloc import tune_malloc
from pscommon.telemetry.http import MetricsServer, new_registry
from pscommon.wire.frames import add_parameter_server_to_server
from psproto.v1 import coordinator_pb2, parameter_server_pb2, shard_pb2, standby_pb2
from psproto.v1.coordinator_pb2_grpc import add_CoordinatorServiceServicer_to_server
from psproto.v1.shard_pb2_grpc import add_ShardServiceServicer_to_server
from psproto.v1.standby_pb2_grpc import add_StandbyServiceServicer_to_server
from psserver.coordinator.final_state import conclude
from psserver.coordinator.service import CoordinatorService
from psserver.coordinator.servicer import ControlPlaneServicer
from psserver.coordinator.status import statistics
from psserver.core.shard.replication import ReplicationMachine
from psserver.durability.data_formats import check_data_formats
from psserver.durability.record_sink import RecordSink, RecordSource, disk_log
from psserver.durability.shard_log import ShardLog
from psserver.durability.snapshots import SnapshotManager
from psserver.durability.state_records import StateRecord, StateRecordKind, about, job_state
from psserver.process.config import ServerConfig
from psserver.process.grpc_server import listen
from psserver.process.identity import ServerIdentity
from psserver.process.job_id_file import JobIdFile, made_up
from psserver.process.metrics import ServerMetrics
from psserver.process.port_file import PortFile
from psserver.process.rpc_metrics import RpcTimer
from psserver.process.shard_count_file import ShardCountFile
from psserver.replication.lease_directory import begun, lease_of
from psserver.replication.primary import PrimaryReplicator
from psserver.replication.servicer import StandbyServicer, of_this_shard
from psserver.replication.standby import Standby
from psserver.replication.standby_state import Promotion, settings
from psserver.shard.coordinator_link import CoordinatorLink
from psserver.shard.engine import ShardEngine
from psserver.shard.peer_servicer import PeerServicer
from psserver.transfer.servicer import DataPlaneServicer

CALLS = 1024
"""Calls that one server answers at a time (one that waits for a round holds a thread); more get
RESOURCE_EXHAUSTED.
"""

DRAIN = 8.0
"""Seconds that a shard told to end waits for the coordinator's last snapshot; containers give
ten.
"""

PORT = 2.0
"""Seconds that a port takes to be free after its server has ended."""

STILL = 5.0
"""Seconds in which a moment must come in which everything can be copied for a standby."""

SERVICES = (
    parameter_server_pb2.DESCRIPTOR.services_by_name["ParameterServerService"].full_name,
    standby_pb2.DESCRIPTOR.services_by_name["StandbyService"].full_name,
    shard_pb2.DESCRIPTOR.services_by_name["ShardService"].full_name,
    coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"].full_name,
)

log = logging.getLogger("psserver")


class Server:
    """A running shard. Raises TakenError, SnapshotError and others of PSError's tree where it
    cannot start.

    inherited: what this process has as a standby that is primary now.
    """

    def __init__(self, config: ServerConfig, promotion: Promotion | None = None) -> None:
        self.config = config
        self._promotion, self._port_file = promotion, PortFile(config.port_file)
        self._resources = ExitStack()
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
        layout = (
            self._make_layout()
        )  # before there is a port: a second attempt without this disk would find it taken
        patience = PORT if self._promotion is not None else 0.0
        self._grpc, self.address = listen(
            config.bind, CALLS, [RpcTimer(self.metrics.rpc).wrap], patience
        )
        self._resources.callback(lambda: self._grpc.stop(grace=None))
        self.replicator = self._make_replicator()
        self.engine = ShardEngine(
            config.shard,
            layout.shards,
            self.metrics,
            self.snapshots.cut,
            config.in_flight,
            config.lanes,
            config.threads or 1,
            self._make_log(),
            config.fitness,
        )
        self._resources.callback(self._end)
        if self._promotion is not None:
            self.engine.install_state(self._promotion.standby_state.shard_state)
        self._resources.callback(lambda: self._grpc.stop(grace=0.2).wait())
        self.identity = self._make_identity(layout)
        self.metrics.about = self._about
        self.service = self._make_service(layout) if config.shard == 0 else None
        self.coordinator_link = None if self.service else self._make_coordinator_link()
        self._serve()
        if config.metrics_bind is not None:
            self.monitor = self._make_monitor(config.metrics_bind)
            self._resources.callback(self.monitor.close)

    def _make_layout(self) -> ShardCountFile:
        """Shard 0 knows best; the others learn it from there."""
        config, standby_state = (
            self.config,
            self._promotion.standby_state if self._promotion is not None else None,
        )
        if config.shard > 0:
            return ShardCountFile(
                standby_state.shard_state.shards if standby_state is not None else config.shards,
                None,
            )
        layout = ShardCountFile(config.shards, config.data_dir)
        if (
            standby_state is not None and standby_state.coordinator is not None
        ):  # which decided, and so knows before the shard does
            layout.take_over(standby_state.hello["layout"], standby_state.coordinator.shards)
        return layout

    def _make_identity(self, layout: ShardCountFile) -> ServerIdentity:
        config, address = self.config, self.config.advertise or self.address
        hello = self._promotion.standby_state.hello if self._promotion is not None else {}
        name = JobIdFile(config.data_dir)
        bound = hello.get("job") or config.job or name.noted
        if config.shard == 0 and self._promotion is None and config.resume != "never":
            name.check(bound)
        job = bound or made_up() if config.shard == 0 else hello.get("job", "")
        if job:
            name.note(
                job
            )  # one that is made up stays, also where shard 0 dies before there is a snapshot
        coordinator = config.join or hello.get("coordinator", "")
        identity = ServerIdentity(
            config.shard, layout.shards, address, coordinator, job, bound, name
        )
        identity.standbys, identity.hint = hello.get("standbys", ()), hello.get("coordinator", "")
        identity.term = self.replicator.term
        return identity

    def _make_replicator(self) -> PrimaryReplicator:
        config = self.config
        lease = lease_of(config)
        primary_record = (
            self._promotion.primary_record
            if self._promotion is not None
            else begun(config, lease, config.advertise or self.address)
        )
        machine = ReplicationMachine(
            primary_record, lease, config.shipping == "sync", time.monotonic()
        )
        replicator = PrimaryReplicator(machine, self.metrics, self._deposed)
        replicator.whole = self._whole
        return replicator

    def _whole(self, begin: Callable[[Iterable[StateRecord]], None]) -> None:
        """Everything that a standby has to know, at one moment."""
        with ExitStack() as stack:
            first, job = (
                stack.enter_context(self.service.paused())
                if self.service is not None
                else ({}, None)
            )
            shard = stack.enter_context(self.engine.export_state(STILL))
            identity, replicator = self.identity, self.replicator
            hello = about(
                StateRecordKind.HELLO,
                term=replicator.term,
                sync=self.config.shipping == "sync",
                job=identity.job,
                coordinator=identity.coordinator,
                standbys=list(identity.standbys),
                settings=settings(self.config),
                optimizers=digest_of_user_defined(),
                **first,
            )
            begin(
                [
                    hello,
                    *shard,
                    *([job_state(job)] if job is not None else []),
                    about(StateRecordKind.LOADED),
                ]
            )

    def _deposed(self, why: str) -> Never:
        """Not primary any more: nothing more may leave this process. why: empty where that was
        planned.
        """
        if why:
            log.error("this server has to end", extra={"problem": why})
        else:
            log.warning("another server is primary of this shard now, as planned")
        self._port_file.remove()
        logging.shutdown()
        os._exit(ExitCode.TAKEN if why else ExitCode.DONE)

    def _make_log(self) -> ShardLog:
        config = self.config
        disk = disk_log(config, f"log-shard-{config.shard}", self.metrics.log_failed)
        log = ShardLog(RecordSink(RecordSource.SHARD, disk, self.replicator), config.shard)
        self._resources.callback(log.close)
        return log

    def _end(self) -> None:
        """No call is under way any more: whatever was answered is written down."""
        if self.service is not None:
            self.service.end()

    def _about(self) -> dict[str, str]:
        """What this shard is part of, as far as it knows."""
        identity = self.identity
        policy = (
            self.service.policy
            if self.service is not None
            else identity.policy or self.config.policy
        )
        return {"shards": str(identity.shards), "job": identity.job, "policy": policy}

    def _make_monitor(self, bind: str) -> MetricsServer:
        """A standby that is primary now goes on where it was watched."""
        monitor = self._promotion.monitor if self._promotion is not None else None
        if monitor is None:
            return MetricsServer(bind, self._registry, self.ready)
        monitor.show(self._registry, self.ready)
        return monitor

    def _make_service(self, layout: ShardCountFile) -> CoordinatorService:
        if self._promotion is None:
            if self.config.resume != "never":
                self.snapshots.check_place()
            self.snapshots.next_generation()
        service = CoordinatorService(
            self.config,
            layout,
            self.identity,
            self.engine,
            self.snapshots,
            self.metrics,
            self.replicator,
        )
        self.snapshots.on_part = lambda part: service.snapshot_part(0, part)
        return service

    def _make_coordinator_link(self) -> CoordinatorLink:
        tell = lambda: statistics(self.engine, self.replicator)  # noqa: E731
        durable = self.config.durability == "log"
        return CoordinatorLink(
            self.identity,
            self.engine,
            self.snapshots,
            tell,
            self.config.join_timeout,
            self.replicator,
            durable,
        )

    def _serve(self) -> None:
        add_parameter_server_to_server(DataPlaneServicer(self.engine, self.identity), self._grpc)
        add_ShardServiceServicer_to_server(PeerServicer(self.engine, self.identity), self._grpc)
        if self.service is not None:
            add_CoordinatorServiceServicer_to_server(ControlPlaneServicer(self.service), self._grpc)
        checked = of_this_shard(self.identity)
        add_StandbyServiceServicer_to_server(
            StandbyServicer(self.replicator, None, checked), self._grpc
        )
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        names = (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._grpc)

    @property
    def _services(self) -> tuple[str, ...]:
        """Ours; only shard 0 coordinates."""
        return SERVICES if self.service is not None else SERVICES[:-1]

    def start(self) -> None:
        """Resume if told to, then answer calls."""
        if self.service is not None:
            self.service.start(promotion=self._promotion)
        else:
            assert self.coordinator_link is not None
            self.coordinator_link.start()
        self.replicator.start()
        self._grpc.start()
        for service in ("", *self._services):
            self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        self._port_file.write(self.address, inherited=self._promotion is not None)
        self._announce()
        policy = (
            {} if self.service is None else {"policy": self.service.policy}
        )  # shard 0 knows it, whatever flags say
        log.info(
            "listening", extra={"address": self.address, "shards": self.identity.shards, **policy}
        )

    def _announce(self) -> None:
        """Let commands of this user on this machine find the job without an address."""
        if self.service is None:
            return
        try:
            announcement = JobAnnouncement(self.identity.job, self.identity.address)
        except OSError as error:
            log.warning("commands need --ps to find this job", extra={"problem": str(error)})
        else:
            self._resources.callback(announcement.remove)

    def ready(self) -> tuple[bool, str]:
        """For /readyz: can workers train here?"""
        if self.service is not None:
            waiting = self.service.waiting_for if not self.service.begun else ""
            return (
                not waiting,
                f"waiting for {waiting}" if waiting else f"version {self.engine.version}",
            )
        return (
            self.engine.has_begun,
            f"version {self.engine.version}" if self.engine.has_begun else "no weights yet",
        )

    @property
    def ended(self) -> threading.Event:
        """Set when the job is over, as far as this server goes."""
        return self.service.stopped if self.service is not None else self.coordinator_link.ended  # type: ignore[union-attr]

    @property
    def failure(self) -> PSError | None:
        return (
            self.service.failure
            if self.service is not None
            else self.coordinator_link.failure
            if self.coordinator_link is not None
            else None
        )

    @property
    def not_saved(self) -> str:
        """Why the final weights are not on the disk, where they should be; empty on other
        servers than shard 0.
        """
        return self.service.not_saved if self.service is not None else ""

    @property
    def job_is_over(self) -> bool:
        """As far as this server goes: no other one is to take its place."""
        return (
            self.service.is_over
            if self.service is not None
            else self.coordinator_link is not None and self.coordinator_link.job_ended
        )

    def stop(self, reason: str) -> None:
        """Begin to end, as told by a signal: shard 0 with a last snapshot, others once it has
        their part of that. The job is not over: whoever is left waits for this server to come
        back, or goes on with its standby."""
        if self.service is not None:
            self.service.stop(reason, over=False)
        elif self.coordinator_link is not None:
            self.coordinator_link.leave(DRAIN)

    def close(self) -> None:
        """Answer everyone who waits, finish writing, free everything. Repeating it is harmless."""
        self._health.enter_graceful_shutdown()
        self.engine.stop("its process ends")
        if self.coordinator_link is not None:
            self.coordinator_link.close()
        if self.service is not None:
            self.service.close()
        self.snapshots.close()
        self.replicator.close(over=self.job_is_over)
        self._resources.close()
        self._port_file.remove()


def run(config: ServerConfig) -> int:
    """Body of the ps-server command. Returns its exit code; PSErrors before anything runs are
    raised.
    """
    shared_memory.sweep()
    if config.malloc == "tuned":
        tune_malloc()
    torch.set_num_threads(
        1
    )  # the engine has a team; torch's would be one for each thread that answers a call
    if config.standby_of is None:
        return serve(Server(config))
    standby = Standby(config, lease_of(config))
    signals = _StopSignals(standby.stop)
    promotion = standby.run()
    if standby.failure is not None:
        raise standby.failure
    if promotion is None:
        return signals.exit_code(over=False)
    return serve(successor(config, standby.address, promotion), signals)


def successor(config: ServerConfig, address: str, promotion: Promotion) -> Server:
    """The primary that a standby becomes, at the standby's address. Its predecessor may still
    hold their data, or the disk be broken: nobody else has what is here, so it goes on without."""
    config = replace(config, bind=address, standby_of=None)
    try:
        return Server(config, promotion)
    except (TakenError, InvalidRequestError, SnapshotError) as error:
        if config.data_dir is None:
            raise
        why = (
            "whose holder still lives" if isinstance(error, TakenError) else "which cannot be used"
        )
        then = "then start a standby of this server, and promote it: that one writes there again"
        log.error(f"going on without --data-dir, {why}", extra={"problem": f"{error}; {then}"})
    server = Server(
        replace(config, data_dir=None, snapshot_every=None, durability="snapshot"), promotion
    )
    if server.service is not None:
        server.service.lost_data_dir = f"this server went on without {config.data_dir}, {why}"
    return server


def serve(server: Server, signals: "_StopSignals | None" = None) -> int:
    """Until the job ends; the exit code. signals: that this process has had as a standby, and
    will have.
    """
    signals = signals or _StopSignals(server.stop)
    try:
        server.start()
        signals.tell(server.stop)
        interruptible.wait(server.ended)
    finally:
        server.close()
    return conclude(server.failure, server.not_saved, signals.exit_code(server.job_is_over))


class _StopSignals:
    """The first one ends the server in order, a second one at once."""

    def __init__(self, stop: Callable[[str], None]) -> None:
        self._stop, self._number = stop, 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._first)

    def tell(self, stop: Callable[[str], None]) -> None:
        """Of one that comes, and of one that came before."""
        self._stop = stop
        if self._number:
            stop(signal.Signals(self._number).name)

    def _first(self, number: int, frame: FrameType | None) -> None:
        self._number = number
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_DFL)
        threading.Thread(
            target=self._stop, args=(signal.Signals(number).name,), daemon=True
        ).start()

    def exit_code(self, over: bool) -> int:
        """0 where the job is over for this server; else that of the signal, so that whoever
        started it can tell.
        """
        return 128 + self._number if self._number and not over else int(ExitCode.DONE)
