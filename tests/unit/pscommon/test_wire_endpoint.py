"""Effects of channel settings that no other test shows."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc

from pscommon.wire.endpoint import Endpoint, open_channel

SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""An empty frame of this kind: what a server says first (RFC 9113, 3.4)."""

ROUND_TRIP = 1.0
"""Seconds, where a connection takes two of them."""


def test_a_connection_with_a_round_trip_of_one_second_can_be_opened() -> None:
    """With a full queue or a satellite in between, an attempt to connect must last that long."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:

        def greet() -> None:
            connection, _ = server.accept()
            with connection:
                threading.Event().wait(2 * ROUND_TRIP)
                connection.sendall(SETTINGS)
                assert done.wait(20)

        done, greeting = threading.Event(), pool.submit(greet)
        with open_channel(Endpoint(f"127.0.0.1:{server.getsockname()[1]}")) as channel:
            grpc.channel_ready_future(channel).result(timeout=10)
            done.set()
        greeting.result(20)
