"""Run ps-server: start a server or a standby, serve until the job ends, and handle signals."""

import signal
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from ipaddress import ip_address
from types import FrameType

import torch

from pscommon.core.errors import InvalidRequestError, SnapshotError, TakenError
from pscommon.core.exit_codes import ExitCode
from pscommon.security.credentials import process_credentials
from pscommon.security.settings import warn_of_plain_text
from pscommon.system import signals as interruptible
from pscommon.system.process_limits import tune_malloc
from pscommon.telemetry.logs import get_logger
from psserver.coordinator.final_state import conclude
from psserver.process.config import ServerConfig
from psserver.replication.standby_state import Promotion
from psserver.roles.standby import build_standby
from psserver.server import Server
from psserver.sockets.socket_port import SocketPort

log = get_logger(__name__)


def run(config: ServerConfig) -> int:
    """Run ps-server and return its exit code. Errors before the start are raised as PSError."""
    warn_of_loopback(config.bind)
    warn_of_exposure(config)
    tune_malloc()
    # the engine has its own threads; torch would start some for every calling thread
    torch.set_num_threads(1)
    tls = process_credentials().tls
    if tls is not None:
        threading.Thread(
            target=tls.watch, args=(threading.Event(),), name="certificate", daemon=True
        ).start()
    if config.standby_of is None:
        return serve(Server(config))
    with ExitStack() as resources:
        standby, stream_port = build_standby(config, resources)
        signals = _StopSignals(standby.stop)
        promotion = standby.run()
        if standby.failure is not None:
            raise standby.failure
        if promotion is None:
            return signals.exit_code(is_over=False)
        stream_port.stop()
        return serve(successor(config, standby.address, promotion, stream_port), signals)


def warn_of_loopback(bind: str) -> None:
    """Warn that a host name is this machine's loopback address, as Debian makes it in /etc/hosts.

    bind: HOST:PORT to listen on. An address, or localhost, is taken as meant.
    """
    host, _, port = bind.rpartition(":")
    host = host.strip("[]")
    try:
        found = {str(address[0]) for *_, address in socket.getaddrinfo(host, None)}
    except OSError:  # the server's start tells
        return
    is_meant = host in found or host == "localhost"
    if not is_meant and all(ip_address(address).is_loopback for address in found):
        log.warning(
            "bind_on_loopback",
            bind=bind,
            address=min(found),
            effect="processes on other machines cannot reach this server",
            remedy=f"--bind 0.0.0.0:{port} --advertise HOST:PORT, with the "
            "address that other machines use",
        )


def warn_of_exposure(config: ServerConfig) -> None:
    """Warn, once per start, of what this server does not protect."""
    security = config.security
    warn_of_plain_text((config.bind, config.stream_bind, config.metrics_bind), security)
    if security.tls is not None and security.token_file is None:
        log.warning(
            "roles_not_checked",
            effect="each certificate of the CA has all roles: also workers may stop the job",
            remedy="--token-file with the tokens of `ps-ctl token init DIR`",
        )


def successor(
    config: ServerConfig, address: str, promotion: Promotion, stream_port: SocketPort
) -> Server:
    """Return the primary that a standby becomes, at the standby's addresses.

    If its data directory is still locked or cannot be used, it continues without: no other
    process has its state.
    """
    config = replace(config, bind=address, standby_of=None)
    try:
        return Server(config, promotion, stream_port)
    except (TakenError, InvalidRequestError, SnapshotError) as error:
        if config.data_dir is None:
            raise
        why = (
            "which another process still holds"
            if isinstance(error, TakenError)
            else "which cannot be used"
        )
        log.error(
            "data_dir_abandoned",
            reason=why,
            problem=str(error),
            remedy="start a standby of this server with that directory, and promote it",
        )
    return Server(
        replace(config, data_dir=None, snapshot_every=None, durability="snapshot"),
        promotion,
        stream_port,
        f"this server continued without {config.data_dir}, {why}",
    )


def serve(server: Server, signals: "_StopSignals | None" = None) -> int:
    """Serve until the job ends; return the exit code.

    Args:
        signals: The signal handlers that this process installed as a standby.
    """
    signals = signals or _StopSignals(server.stop)
    try:
        server.start()
        signals.set_stop(server.stop)
        interruptible.wait(server.ended)
    finally:
        server.close()
    return conclude(server.failure, server.not_saved, signals.exit_code(server.job_is_over))


class _StopSignals:
    """Stops the server at the first signal, and kills the process at the second."""

    def __init__(self, stop: Callable[[str], None]) -> None:
        self._stop, self._number = stop, 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._first)

    def set_stop(self, stop: Callable[[str], None]) -> None:
        """Set the function that stops the server; call it if a signal has already arrived."""
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

    def exit_code(self, is_over: bool) -> int:
        """Return 0 if the job is over for this server, otherwise the code of the signal."""
        return 128 + self._number if self._number and not is_over else int(ExitCode.DONE)
