"""Worker processes that have ended: found in this system's process table, or reported by their
parent process.
"""

import threading
from collections.abc import Iterable

from pscommon.system.process_id import has_ended, is_running

FOUND = "its process has ended"


class WorkerExits:
    """Processes known to have ended, by worker. Thread-safe.

    A process is looked up only after it was seen here: then its absence is a proof, even if two
    systems look alike.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: dict[int, str] = {}
        self._local: set[int] = set()
        self._reported: dict[int, str] = {}

    def learn(self, worker: int, name: str) -> None:
        """Record the name of a worker's process (`pscommon.system.process_id`)."""
        with self._lock:
            if not name or self._names.get(worker) == name:
                return
            self._names[worker] = name
            if is_running(name):
                self._local.add(worker)

    def report(self, name: str, reason: str) -> list[int]:
        """Record that a process has ended, as reported by the process that started it.

        Returns:
            Its workers.
        """
        with self._lock:
            workers = [worker for worker, known in self._names.items() if known == name]
            self._reported.update(dict.fromkeys(workers, reason))
            return workers

    def lose(self, worker: int, reason: str) -> None:
        """Record that a worker is lost, as reported by another process of its group."""
        with self._lock:
            self._reported[worker] = reason

    def at(self, place: str) -> dict[int, str]:
        """Return the processes of workers in another PID namespace, for a server there to watch."""
        with self._lock:
            others = self._names.keys() - self._local if place else ()
            return {
                worker: name
                for worker in others
                if (name := self._names[worker]).startswith(f"{place}/")
            }

    def found(self, workers: Iterable[int]) -> None:
        """Record that the processes of these workers have ended, as a server in their namespace
        has seen.
        """
        with self._lock:
            self._reported.update(dict.fromkeys(workers, FOUND))

    def among(self, workers: Iterable[int]) -> dict[int, str]:
        """Return the proof for each of these workers whose process has ended; forget all other
        workers.

        Reads one small file of /proc for each local worker (about 20 us).
        """
        with self._lock:
            here = set(workers)
            self._names = {worker: name for worker, name in self._names.items() if worker in here}
            self._local &= self._names.keys()
            self._reported = {
                worker: how for worker, how in self._reported.items() if worker in self._names
            }
            return {
                worker: FOUND for worker in self._local if has_ended(self._names[worker])
            } | self._reported
