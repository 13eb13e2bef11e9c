"""Threads for the parts of a request, one per shard but the first, which the caller runs."""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from pscommon.system import signals as interruptible
from psworker.transport.streams import Cancellation

T = TypeVar("T")

Job = tuple[Callable[[], Any], "Future[Any]"]


class ShardExecutor:
    """Runs the parts of a request at the same time, in daemon threads."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queues: list[queue.SimpleQueue[Job | None]] = []
        self._threads: list[threading.Thread] = []

    def run(self, parts: Sequence[Callable[[], T]], cancellation: Cancellation) -> list[T]:
        """Return the results in order; a failure cancels the other parts, and the first is raised.

        Returns or raises only when no part runs any more: the parts use the caller's memory.
        """
        futures = [
            self._submit(number, part, cancellation) for number, part in enumerate(parts[1:])
        ]
        try:
            first = parts[0]()
        except BaseException as error:
            cancellation.cancel(error)
        self._await(futures, cancellation)
        if cancellation.cause is not None:
            raise cancellation.cause
        return [first, *(future.result() for future in futures)]

    def close(self) -> None:
        """End the threads, which must be idle."""
        for waiting in self._queues:
            waiting.put(None)
        for thread in self._threads:
            thread.join(10.0)
        self._queues, self._threads = [], []

    def _submit(
        self, number: int, part: Callable[[], T], cancellation: Cancellation
    ) -> "Future[T]":
        if number == len(self._threads):
            self._add_thread()
        future: Future[T] = Future()
        # Runs before the waiting thread wakes, so that a failure ends the wait for the others.
        future.add_done_callback(lambda done: _spread(done, cancellation))
        self._queues[number].put((part, future))
        return future

    def _add_thread(self) -> None:
        tasks: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        name = f"{self._name}-{len(self._threads) + 1}"
        thread = threading.Thread(target=_work, args=(tasks,), name=name, daemon=True)
        self._queues.append(tasks)
        self._threads.append(thread)
        thread.start()

    @staticmethod
    def _await(futures: "Sequence[Future[Any]]", cancellation: Cancellation) -> None:
        for future in futures:
            while not future.done():
                try:
                    interruptible.settle(future)
                except BaseException as interrupt:
                    # Ctrl-C: end the calls, but still wait, as the parts use the caller's memory.
                    cancellation.cancel(interrupt)


def _work(tasks: "queue.SimpleQueue[Job | None]") -> None:
    while (job := tasks.get()) is not None:
        part, future = job
        try:
            future.set_result(part())
        except BaseException as error:
            future.set_exception(error)
        # A finished job must not keep its gradients alive until the next job arrives.
        del job, part, future


def _spread(future: "Future[Any]", cancellation: Cancellation) -> None:
    if (error := future.exception()) is not None:
        cancellation.cancel(error)
