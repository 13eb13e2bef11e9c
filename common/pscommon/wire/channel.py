"""The gRPC settings of this system: one place, the same on both ends.

Those that matter, each tried (docs of gRPC core: channel arguments, keepalive); two more are in
pscommon/__init__.py:

- Without `http2.ping_timeout_ms` a stopped peer goes unnoticed for a minute; `keepalive_timeout_ms` does nothing.
- A server with default settings cuts off clients that ping often, so it has to allow our interval.
- SO_REUSEPORT is on by default and lets two servers share one port, each getting some of the clients.
- The default wait before connecting again grows to two minutes; a restarted server must be found in a moment: with 1 s
  workers pushed 1.8 s (the median) after a kill of a server, with a quarter 1.4 s.
- `min_reconnect_backoff_ms` is how long one attempt to connect may take, 20 s by default: as long as that, a network
  that comes back is not noticed, because the attempt that was made before hangs. It takes two round trips: over a
  line of 2 Mbit/s whose queue is full it took 9 s to connect with 1 s for each attempt, 2 s with 2.5 s.
- A name is looked up again after a failure to connect, but by default at most once in 30 s: a server that came back
  under its name at another address was found after 24 s.
- The answer to a ping queues behind the data on its way, a MB or two: with 2.2 s for it, a large push over 5 Mbit/s
  never arrived, because its connection was taken for dead. So tensors have connections of their own, with more
  patience; who vanishes is noticed by the others: heartbeats, and the reports of shards.
- `keepalive_timeout_ms` becomes TCP's user timeout: packets that nobody confirms end any connection, slow or not.
"""

import os

import grpc

from pscommon.core.errors import InvalidRequestError

FRAME_BYTES = 1 << 20
"""Payload of one data frame; 1 to 2 MiB is fastest."""

MAX_MESSAGE = 64 << 20
"""Bytes of the largest message either side takes: tensors travel in frames, but a job's whole
state in one message. It takes about 200 bytes a tensor, 500 a loop that has ended and 400 a
worker that has left, a manifest the same; so there is room for some 100 000 of each, and a
stranger cannot make a server take more than this for one call."""

Option = tuple[str, int]

_BOTH: tuple[Option, ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    # error details hold the differences between two models: more than the default 8 KiB of metadata
    ("grpc.max_metadata_size", 64 << 10),
    ("grpc.absolute_max_metadata_size", 128 << 10),
    # a peer that is silent for a second is asked
    ("grpc.keepalive_time_ms", 1_000),
    ("grpc.keepalive_timeout_ms", 2_200),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

PROMPT: Option = ("grpc.http2.ping_timeout_ms", 2_200)
"""For small messages: whoever vanishes is noticed within 3.2 s."""

PATIENT: Option = ("grpc.http2.ping_timeout_ms", 10_000)
"""For tensors, on lines of 2 Mbit/s and more; and for servers, which cannot know what a
connection will be used for.
"""

CLIENT_OPTIONS: tuple[Option, ...] = (
    *_BOTH,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_500),
    ("grpc.max_reconnect_backoff_ms", 250),
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    # the client repeats calls itself: it knows which of them are safe to repeat
    ("grpc.enable_retries", 0),
    # the servers of a job are neighbours; a web proxy of the environment is not meant for them
    ("grpc.enable_http_proxy", 0),
    # a TCP connection for each channel: two clients in one process do not wait for each other
    ("grpc.use_local_subchannel_pool", 1),
)

SERVER_OPTIONS: tuple[Option, ...] = (
    *_BOTH,
    PATIENT,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    # sockets that connect and then say nothing are dropped
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.http2.settings_timeout", 5_000),
    # gRPC takes bytes in before a call asks for them, and its windows would grow to a whole push
    # for each that waits for room: 64 of 4 MB held 610 MB instead of 160, for 3 % of the time of a
    # push of 100 MB
    ("grpc.http2.bdp_probe", 0),
)


_users: set[int] = set()


def open_channel(address: str, tensors: bool = False) -> grpc.Channel:
    """A channel to "HOST:PORT", which connects when first used. InvalidRequestError in a fork of
    one that had any.

    tensors: for exchanges, which may take long on a slow line.
    """
    _users.add(os.getpid())
    if len(_users) > 1:
        raise InvalidRequestError(
            "gRPC does not work in a process that was forked from one that used it; start this "
            "process with "
            "multiprocessing's spawn or forkserver, or connect in the children only"
        )
    return grpc.insecure_channel(address, options=(*CLIENT_OPTIONS, PATIENT if tensors else PROMPT))
