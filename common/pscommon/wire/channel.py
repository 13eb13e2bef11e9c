"""gRPC channel settings for clients and servers.

Measured effects of settings that differ from the defaults (gRPC core documents channel arguments
and keepalive); two more settings are in pscommon/__init__.py:

- `http2.ping_timeout_ms`: by default a stopped peer is detected only after a minute;
  `keepalive_timeout_ms` has no effect on that.
- `http2.min_ping_interval_without_data_ms`: by default a server disconnects clients with our
  ping interval.
- `so_reuseport`: by default two servers can share one port, and each gets some of the clients.
- `max_reconnect_backoff_ms`: the default grows to two minutes. After the kill of a server, workers
  pushed again after 1.8 s (median) with 1 s, after 1.4 s with 0.25 s.
- `min_reconnect_backoff_ms` bounds one connection attempt, 20 s by default. An attempt that hangs
  delays the detection of a recovered network. An attempt needs two round trips: over a full line
  of 2 Mbit/s connecting took 9 s with 1 s per attempt, 2 s with 2.5 s.
- `dns_min_time_between_resolutions_ms`: by default names are resolved at most once in 30 s; a
  server with a new address was found after 24 s.
- The answer to a ping queues behind 1 to 2 MB of data. With a timeout of 2.2 s a large push over
  5 Mbit/s never arrived, since its connection was considered dead. So tensors use separate
  connections with a longer timeout; heartbeats and shard reports detect lost peers.
- `keepalive_timeout_ms` becomes TCP_USER_TIMEOUT: unacknowledged packets end any connection.
"""

import os

import grpc

from pscommon.core.errors import InvalidRequestError

FRAME_BYTES = 1 << 20
"""Payload of one data frame; 1 to 2 MiB is fastest."""

MAX_MESSAGE_BYTES = 64 << 20
"""Maximum size of a message in bytes. Tensors are sent in frames, but the state of a job in one
message: about 200 bytes per tensor, 500 per ended loop, 400 per former worker. The limit allows
some 100 000 of each, and bounds the memory for one call of an unknown peer.
"""

Option = tuple[str, int]

_BOTH: tuple[Option, ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # error details list the differences between two models: more than the default of 8 KiB
    ("grpc.max_metadata_size", 64 << 10),
    ("grpc.absolute_max_metadata_size", 128 << 10),
    # ping a peer after a second without data
    ("grpc.keepalive_time_ms", 1_000),
    ("grpc.keepalive_timeout_ms", 2_200),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

PROMPT: Option = ("grpc.http2.ping_timeout_ms", 2_200)
"""Ping timeout for small messages: a lost peer is detected within 3.2 s."""

PATIENT: Option = ("grpc.http2.ping_timeout_ms", 10_000)
"""Ping timeout for tensors over at least 2 Mbit/s, and for servers, which serve both kinds of
connections.
"""

CLIENT_OPTIONS: tuple[Option, ...] = (
    *_BOTH,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_500),
    ("grpc.max_reconnect_backoff_ms", 250),
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    # the client repeats calls itself: it knows which of them are safe to repeat
    ("grpc.enable_retries", 0),
    # servers are in the local network: ignore the web proxy of the environment
    ("grpc.enable_http_proxy", 0),
    # one TCP connection per channel: two clients in one process do not block each other
    ("grpc.use_local_subchannel_pool", 1),
)

SERVER_OPTIONS: tuple[Option, ...] = (
    *_BOTH,
    PATIENT,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    # drop connections without a handshake
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.http2.settings_timeout", 5_000),
    # without BDP probes, flow control windows stay small. With probes each waiting push is
    # buffered completely: 64 pushes of 4 MB took 610 MB instead of 160 MB, while a push of 100 MB
    # took 3 % less time
    ("grpc.http2.bdp_probe", 0),
)


_users: set[int] = set()


def open_channel(address: str, tensors: bool = False) -> grpc.Channel:
    """Return a channel to HOST:PORT, which connects at its first use.

    Args:
        address: HOST:PORT.
        tensors: use the longer ping timeout for transfers of tensors.

    Raises:
        InvalidRequestError: the process is a fork of one that used gRPC.
    """
    _users.add(os.getpid())
    if len(_users) > 1:
        raise InvalidRequestError(
            "gRPC does not work in a fork of a process that used it. Try: start this process with "
            "multiprocessing's spawn or forkserver, or connect in the children only"
        )
    return grpc.insecure_channel(address, options=(*CLIENT_OPTIONS, PATIENT if tensors else PROMPT))
