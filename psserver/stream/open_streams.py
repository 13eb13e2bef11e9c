"""The stream connections of workers to one shard."""

import threading
from collections.abc import Callable

from psserver.shard.observers import ShardObserver


class OpenStreams(ShardObserver):
    """The open stream of each worker. Thread-safe.

    A worker has one stream. A newer one closes it: the worker has given it up.
    """

    def __init__(self) -> None:
        self._closers: dict[int, Callable[[bool], None]] = {}
        self._lock = threading.Lock()

    def opened(self, worker: int, close: Callable[[bool], None]) -> None:
        """Record the stream of a worker; observers (worker 0) may have any number.

        close: closes the stream without waiting; with False only if it is receiving a push.
        """
        if worker:
            with self._lock:
                older, self._closers[worker] = self._closers.get(worker), close
            if older is not None:
                older(True)

    def closed(self, worker: int, close: Callable[[bool], None]) -> None:
        with self._lock:
            if self._closers.get(worker) == close:
                del self._closers[worker]

    def on_evict(self, worker: int) -> None:
        """End the transfer of a worker that is no longer a member, and free its memory.

        A stream that moves no bytes stays: the worker's next request is answered with the reason.
        """
        with self._lock:
            close = self._closers.get(worker)
        if close is not None:
            close(False)
