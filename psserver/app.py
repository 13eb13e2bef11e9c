"""One server process: everything is made, started and stopped here, in this order."""

import logging
import secrets
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import FrameType

import grpc
import torch
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pscommon import interruptible, shared_memory
from pscommon.core.errors import PSError, TakenError
from pscommon.exits import Exit
from pscommon.malloc import tune_malloc
from pscommon.monitor import Monitor, new_registry
from pscommon.snapshot import DataDirLock
from pscommon.wire.channel import SERVER_OPTIONS
from pscommon.wire.frames import add_parameter_server_to_server
from psproto.v1 import coordinator_pb2, parameter_server_pb2
from psproto.v1.coordinator_pb2_grpc import add_CoordinatorServiceServicer_to_server
from psserver.archive import Archive
from psserver.config import ServerConfig
from psserver.coordinator_servicer import Coordinator
from psserver.engine import Engine
from psserver.hub import Hub
from psserver.identity import Identity
from psserver.interceptor import RpcTimer
from psserver.link import Link
from psserver.metrics import ServerMetrics
from psserver.servicer import ParameterServer
from psserver.shard_log import ShardLog
from psserver.status import statistics

CALLS = 1024
"""Calls that one server answers at a time (one that waits for a round holds a thread); more get RESOURCE_EXHAUSTED."""

DRAIN = 8.0
"""Seconds that a shard told to end waits for the coordinator's last snapshot; containers give ten."""

SERVICES = (
    parameter_server_pb2.DESCRIPTOR.services_by_name["ParameterServerService"].full_name,
    coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"].full_name,
)

log = logging.getLogger("psserver")


class Server:
    """A running shard. Raises TakenError, SnapshotError and others of PSError's tree where it cannot start."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self._resources = ExitStack()
        self.hub: Hub | None = None
        try:
            self._build()
        except BaseException:
            self._resources.close()
            raise

    def _build(self) -> None:
        config = self.config
        if config.data_dir is not None:
            self._resources.enter_context(DataDirLock(config.data_dir, config.shard))
        registry = new_registry()
        self.metrics = ServerMetrics(registry, shard=config.shard)
        self.archive = Archive(config.data_dir, config.shard, config.shards, config.snapshot_keep, self.metrics)
        self.engine = Engine(
            config.shard,
            config.shards,
            self.metrics,
            self.archive.cut,
            config.in_flight,
            config.lanes,
            config.threads or 1,
            self._make_log(),
            config.fitness,
        )
        self._resources.callback(self._end)
        self._grpc, self.address = self._listen()
        self._resources.callback(lambda: self._grpc.stop(grace=0.2).wait())
        job = (config.job or f"job-{secrets.token_hex(4)}") if config.shard == 0 else ""
        self.identity = Identity(config.shard, config.shards, config.advertise or self.address, config.join or "", job)
        self.identity.on_job = self._show_job
        self._show_job(job)
        self.hub = self._make_hub() if config.shard == 0 else None
        self.link = None if self.hub else self._make_link()
        self._serve()
        if config.metrics_bind is not None:
            self.monitor = Monitor(config.metrics_bind, registry, self.ready)
            self._resources.callback(self.monitor.close)

    def _make_log(self) -> ShardLog | None:
        config = self.config
        if config.durability != "log" or config.data_dir is None:
            return None
        log = ShardLog(config.data_dir, config.shard, config.shards, config.log_fsync, self.metrics.log_failed)
        self._resources.callback(log.close)
        return log

    def _end(self) -> None:
        """No call is under way any more: whatever was answered is written down."""
        if self.hub is not None:
            self.hub.end()

    def _listen(self) -> tuple[grpc.Server, str]:
        server = grpc.server(
            ThreadPoolExecutor(CALLS, thread_name_prefix="call"),
            interceptors=[RpcTimer(self.metrics.rpc)],
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=CALLS,
        )
        host, _, _ = self.config.bind.rpartition(":")
        try:
            port = server.add_insecure_port(self.config.bind)
        except RuntimeError as error:
            raise TakenError(
                f"cannot listen on {self.config.bind}: another process has the port, or the address is not this "
                "machine's; choose another --bind (port 0 picks a free one)"
            ) from error
        return server, f"{host}:{port}"

    def _show_job(self, job: str) -> None:
        self.metrics.shard_info(shards=self.config.shards, job=job, policy=self.config.policy)

    def _make_hub(self) -> Hub:
        self.archive.next_generation()
        hub = Hub(self.config, self.identity, self.engine, self.archive, self.metrics)
        self.archive.on_part = lambda part: hub.snapshot_part(0, part)
        return hub

    def _make_link(self) -> Link:
        return Link(self.identity, self.engine, self.archive, lambda: statistics(self.engine), self.config.join_timeout)

    def _serve(self) -> None:
        add_parameter_server_to_server(ParameterServer(self.engine, self.identity), self._grpc)
        if self.hub is not None:
            add_CoordinatorServiceServicer_to_server(Coordinator(self.hub), self._grpc)
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        names = (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._grpc)

    @property
    def _services(self) -> tuple[str, ...]:
        """Ours; only shard 0 coordinates."""
        return SERVICES if self.hub is not None else SERVICES[:1]

    def start(self) -> None:
        """Resume if told to, then answer calls."""
        if self.hub is not None:
            self.hub.start()
        else:
            assert self.link is not None
            self.link.start()
        self._grpc.start()
        for service in ("", *self._services):
            self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        if self.config.port_file is not None:
            temporary = self.config.port_file.with_suffix(".tmp")
            temporary.write_text(self.address.rpartition(":")[2] + "\n")
            temporary.replace(self.config.port_file)
        log.info(
            "listening", extra={"address": self.address, "shards": self.config.shards, "policy": self.config.policy}
        )

    def ready(self) -> tuple[bool, str]:
        """For /readyz: can workers train here?"""
        if self.hub is not None:
            waiting = self.hub.waiting_for if not self.hub.begun else ""
            return not waiting, waiting or f"version {self.engine.version}"
        return self.engine.begun, f"version {self.engine.version}" if self.engine.begun else "no weights yet"

    @property
    def ended(self) -> threading.Event:
        """Set when the job is over, as far as this server goes."""
        return self.hub.stopped if self.hub is not None else self.link.ended  # type: ignore[union-attr]

    @property
    def failure(self) -> PSError | None:
        return self.hub.failure if self.hub is not None else self.link.failure if self.link is not None else None

    def stop(self, reason: str) -> None:
        """Begin to end: shard 0 ends the job, with a last snapshot; others wait a while for it to do so."""
        if self.hub is not None:
            self.hub.stop(reason)
        elif self.link is not None:
            threading.Timer(DRAIN, self.link.ended.set).start()

    def close(self) -> None:
        """Answer everyone who waits, finish writing, free everything. Repeating it is harmless."""
        self._health.enter_graceful_shutdown()
        self.engine.stop("the job is over")
        if self.link is not None:
            self.link.close()
        if self.hub is not None:
            self.hub.close()
        self.archive.close()
        self._resources.close()
        if self.config.port_file is not None:
            self.config.port_file.unlink(missing_ok=True)


def run(config: ServerConfig) -> int:
    """Body of the ps-server command. Returns its exit code; PSErrors before anything runs are raised."""
    shared_memory.sweep()
    if config.malloc == "tuned":
        tune_malloc()
    torch.set_num_threads(1)  # the engine has a team; torch's would be one for each thread that answers a call
    server = Server(config)
    signals = _Signals(server)
    try:
        _load_optimizers()
        server.start()
        interruptible.wait(server.ended)
    finally:
        server.close()
    if server.failure is not None:
        raise server.failure
    return signals.exit_code


def _load_optimizers() -> None:
    """The first torch.optim object of a process takes a second: before the server answers, not while a worker waits."""
    torch.optim.SGD([torch.zeros(1)], lr=0.1)


class _Signals:
    """SIGTERM drains (exit 0), SIGINT drains and says so (130); a second one ends the process at once."""

    def __init__(self, server: Server) -> None:
        self.exit_code = int(Exit.DONE)
        self._server = server
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._first)

    def _first(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self.exit_code = int(Exit.INTERRUPTED)
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_DFL)
        threading.Thread(target=self._server.stop, args=(signal.Signals(number).name,), daemon=True).start()
