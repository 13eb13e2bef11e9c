"""Builds a standby."""

from contextlib import ExitStack

from psserver.process.config import ServerConfig
from psserver.replication.handlers import not_primary
from psserver.replication.lease_directory import lease_of
from psserver.replication.standby import Standby
from psserver.sockets.socket_port import SocketPort, open_socket_port


def build_standby(config: ServerConfig, resources: ExitStack) -> tuple[Standby, SocketPort]:
    """Build a standby that does not follow its primary yet; `resources` closes its stream port.

    The port answers that the standby is no primary, until it is stopped.

    Raises:
        TakenError: A requested port, or the failover lock, is not available.
    """
    standby = Standby(config, lease_of(config))
    port = open_socket_port(config, standby.address)
    resources.callback(port.close)
    port.refuse_all(lambda: not_primary(standby.primary))
    return standby, port
