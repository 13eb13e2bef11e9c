"""One server process that is primary: its life, from the data directory's lock to its release."""

import logging
import os
import threading
from contextlib import ExitStack
from functools import partial
from typing import Never

from grpc_health.v1 import health_pb2

from pscommon.core.errors import PSError
from pscommon.core.exit_codes import ExitCode
from pscommon.security.credentials import process_credentials
from pscommon.snapshot import DataDirLock
from pscommon.telemetry.http import MetricsServer
from pscommon.telemetry.logs import get_logger
from pscommon.tracing.recorder import server_spans
from pscommon.wire.metrics_port import serve_metrics, show_expiry
from psserver.coordinator.service import CoordinatorService
from psserver.coordinator.status import describe_page
from psserver.durability.data_formats import check_data_dir_mode, check_data_formats
from psserver.monitoring.live_page import live_pages, page_url
from psserver.monitoring.step_export import start_export
from psserver.peers.coordinator_link import CoordinatorLink
from psserver.process.config import ServerConfig
from psserver.process.port_file import PortFile, announce
from psserver.replication.standby_state import Promotion
from psserver.roles.coordinator import build_coordinator
from psserver.roles.primary import add_services
from psserver.roles.shard import build_shard
from psserver.sockets.listener import SocketListener
from psserver.sockets.socket_port import SocketPort, open_socket_port

LAST_SNAPSHOT_TIMEOUT_SECONDS = 8.0
"""Time that a stopping shard waits for the coordinator's last snapshot; containers grant ten
seconds.
"""

log = get_logger(__name__)


class Server:
    """A running shard.

    Args:
        promotion: The state of a standby that is primary now; None otherwise.
        stream_port: The open port of that standby; None: the server opens one.
        lost_data_dir: Why it continues without its --data-dir; empty otherwise.

    Attributes:
        service: The coordinator; None on other shards than 0.
        coordinator_link: The connection to the coordinator; None on shard 0.

    Raises:
        TakenError, SnapshotError, PSError: The server cannot start.
    """

    def __init__(
        self,
        config: ServerConfig,
        promotion: Promotion | None = None,
        stream_port: SocketPort | None = None,
        lost_data_dir: str = "",
    ) -> None:
        self.config, self._promotion = config, promotion
        self._port_file, self._resources = PortFile(config.port_file), ExitStack()
        try:
            self._build(stream_port, lost_data_dir)
        except BaseException:
            self._resources.close()
            raise

    def _build(self, stream_port: SocketPort | None, lost_data_dir: str) -> None:
        config, promotion, resources = self.config, self._promotion, self._resources
        if config.data_dir is not None:
            resources.enter_context(DataDirLock(config.data_dir, config.shard))
            check_data_dir_mode(config.data_dir, config.security.is_secured)
            check_data_formats(config.data_dir, config.resume)
        role = (
            build_coordinator(config, promotion, lost_data_dir, self._deposed, resources)
            if config.shard == 0
            else build_shard(config, promotion, self._deposed, resources)
        )
        primary = role.primary
        self.metrics, self.snapshots = primary.metrics, primary.snapshots
        self.replicator, self._grpc, self.address = (
            primary.replicator,
            primary.grpc,
            primary.address,
        )
        self.identity, self.engine = role.identity, role.engine
        self.service, self.coordinator_link = role.service, role.link
        resources.callback(lambda: self._grpc.stop(grace=0.2).wait())
        self._health, self._services = add_services(role)
        port = stream_port or open_socket_port(config, self.address)
        self._streams = SocketListener(
            port, self.engine, self.identity, self.metrics.record_call, self.service
        )
        resources.callback(self._streams.close)
        self.metrics.show_shard(self._about)
        self.metrics.show_phases(server_spans)
        if self.service is not None:
            resources.enter_context(self.service.events.attached())
            if export := start_export(self.service.tracing, os.environ):
                resources.callback(export.close)
        if config.metrics_bind is not None:
            self.monitor = self._make_monitor(config.metrics_bind)
            resources.callback(self.monitor.close)
            if self.service is not None:
                self.service.page = page_url(self.monitor.url, self.identity.address)

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

    def _make_monitor(self, bind: str) -> MetricsServer:
        """Return the metrics endpoint; a promoted standby keeps its own."""
        monitor = self._promotion.monitor if self._promotion is not None else None
        pages = live_pages(partial(describe_page, self.service)) if self.service else None
        if monitor is None:
            return serve_metrics(bind, self.metrics.registry, self.ready, pages)
        tls = process_credentials().tls
        if tls is not None:
            show_expiry(self.metrics.registry, tls)
        monitor.show(self.metrics.registry, self.ready, pages)
        return monitor

    def _about(self) -> dict[str, str]:
        """Return the labels of ps_shard_info, as far as this shard knows them."""
        identity = self.identity
        known = self.service.policy if self.service is not None else identity.policy
        policy = known or self.config.policy
        return {"shards": str(identity.shards), "job": identity.job, "policy": policy}

    def start(self) -> None:
        """Continue or begin the job, then answer calls."""
        if self.service is not None:
            self.service.start(promotion=self._promotion)
        elif self.coordinator_link is not None:
            self.coordinator_link.start()
        self.replicator.start()
        self._grpc.start()
        self._streams.start()
        for service in ("", *self._services):
            self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        self._port_file.write(self.address, inherited=self._promotion is not None)
        identity = self.identity
        self._resources.callback(announce(identity.job, identity.address, identity.shard))
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
        self._job_end.close()
        self.snapshots.close()
        self.replicator.close(job_has_ended=self.job_is_over)
        self._resources.close()
        self._port_file.remove()
