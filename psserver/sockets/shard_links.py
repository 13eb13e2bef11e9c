"""Connections of other shards to the coordinator over streams."""

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

from pscommon.core.errors import PSError
from pscommon.telemetry.logs import get_logger
from pscommon.wire.blocking_socket import BlockingSocket
from psproto.v1 import coordinator_pb2 as pb
from psserver.coordinator.service import CoordinatorService
from psserver.coordinator.shard_stream import MakeResponse, serve_shard

LINGER_SECONDS = 1.0
"""Time for a shard to read the last message and to close its side. The kernel drops what is sent if
a socket is closed with unread bytes.
"""

log = get_logger(__name__)


class ShardLinks:
    """Serves these connections with two threads each: there are few, and a report may take long."""

    def __init__(self, coordinator: CoordinatorService) -> None:
        self._coordinator = coordinator
        self._lock = threading.Lock()
        self._open: dict[BlockingSocket, threading.Thread] = {}

    def serve(self, sock: socket.socket) -> None:
        """Serve a connection whose greeting is done. Never waits."""
        link = BlockingSocket(sock, "", "the shard")
        thread = threading.Thread(target=self._serve, args=(link,), name="shard-link", daemon=True)
        with self._lock:
            self._open[link] = thread
        thread.start()

    def close(self) -> None:
        """End all connections and their threads. The coordinator is closed."""
        with self._lock:
            links = dict(self._open)
        deadline = time.monotonic() + LINGER_SECONDS
        for link, thread in links.items():
            thread.join(max(0.0, deadline - time.monotonic()))  # it tells the shard why
            link.cancel()
            thread.join()

    def _serve(self, link: BlockingSocket) -> None:
        has_ended, actions = threading.Event(), list[Callable[[], None]]()
        requests = _until_lost(link, has_ended, actions)
        try:
            for make in serve_shard(
                self._coordinator,
                requests,
                lambda: not link.is_broken,
                actions.append,
                partial(_try_send, link),
            ):
                link.send_message(make)
        except OSError as error:
            log.debug("shard_link_lost", problem=str(error))
        except PSError as error:
            with suppress(OSError):
                link.send_error(error)
        finally:
            link.end_sending()
            if not actions:  # no other thread reads
                deque(requests, 0)
            has_ended.wait(LINGER_SECONDS)
            link.close()
            with self._lock:
                del self._open[link]


def _try_send(link: BlockingSocket, make: MakeResponse) -> bool:
    """Make and send a response without waiting. A lost connection ends elsewhere."""
    with suppress(OSError):
        return link.try_send_message(make)
    return True


def _until_lost(
    link: BlockingSocket, has_ended: threading.Event, actions: Sequence[Callable[[], None]]
) -> Iterator[pb.LinkShardRequest]:
    """Yield the messages of a shard until its connection ends in any way; run the actions then."""
    try:
        yield from link.messages(pb.LinkShardRequest)
    except (OSError, PSError) as error:
        log.debug("shard_link_ended", problem=str(error))
        if isinstance(error, PSError):
            with suppress(OSError):
                link.send_error(error)
    finally:
        link.is_broken = True
        for action in actions:
            action()
        has_ended.set()
