"""Clients that nobody closes: dropped, or left to the end of their process. The job is told all
the same.

The garbage collector finds a dropped one anywhere: in the midst of a call on the channel that is
to be closed, where gRPC's core aborts the process, or under a lock that closing takes. So
nothing is closed there. A thread is told to, through a queue whose `put` may come in the midst
of another (SimpleQueue's).
"""

import atexit
import queue
import threading
import weakref
from typing import Protocol

DROPPED = "its Client was dropped without close()"
ENDED = "its process ended without close()"


class Closable(Protocol):
    def close(self, reason: str = "") -> None:
        """Harmless to repeat."""
        ...


class ClientFinalizer:
    """Closes what `watch` was given once its owner is no more; at the end of the process,
    whatever is left.
    """

    def __init__(self) -> None:
        self._watched: set[Closable] = set()
        self._dropped: queue.SimpleQueue[Closable | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def watch(self, owner: object, connection: Closable) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._close_dropped, name="forgotten-clients", daemon=True
            )
            self._thread.start()
        self._watched.add(connection)
        weakref.finalize(owner, self._drop, connection).atexit = False

    def end(self) -> None:
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


_forgotten = ClientFinalizer()
watch = _forgotten.watch
atexit.register(_forgotten.end)
