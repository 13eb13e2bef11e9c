"""Closes clients that the script drops without `close`, or leaves open at the process's end.

The garbage collector may find a dropped client at any point of the program. At some points a
close is unsafe: inside a call on the same channel gRPC's core aborts the process, and under a
lock that the close needs it deadlocks. So the finalizer only puts the connection into a queue,
and a thread closes it. SimpleQueue's `put` is reentrant.
"""

import atexit
import queue
import threading
import weakref
from typing import Protocol

DROPPED = "its Client was dropped without close()"
ENDED = "its process ended without close()"


class Closable(Protocol):
    """An object with a connection to a job."""

    def close(self, reason: str = "") -> None:
        """Leave the job. May be called again."""
        ...


class ClientFinalizer:
    """Closes watched connections when their owners are collected, or at the process's end."""

    def __init__(self) -> None:
        self._watched: set[Closable] = set()
        self._dropped: queue.SimpleQueue[Closable | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def watch(self, owner: object, connection: Closable) -> None:
        """Close the connection once its owner has been collected."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._close_dropped, name="abandoned-clients", daemon=True
            )
            self._thread.start()
        self._watched.add(connection)
        weakref.finalize(owner, self._drop, connection).atexit = False

    def end(self) -> None:
        """Close all connections and end the thread."""
        for connection in list(self._watched):
            connection.close(ENDED)
        if self._thread is not None:
            self._dropped.put(None)
            self._thread.join()

    def _drop(self, connection: Closable) -> None:
        self._watched.discard(connection)
        self._dropped.put(connection)

    def _close_dropped(self) -> None:
        while (connection := self._dropped.get()) is not None:
            connection.close(DROPPED)


_finalizer = ClientFinalizer()
watch = _finalizer.watch
atexit.register(_finalizer.end)
