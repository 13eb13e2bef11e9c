"""Executors for the calls of one request, one call per shard."""

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from pscommon.system import signals as interruptible
from psworker.transport.exchange_calls import Cancellation


class ShardCall(Protocol):
    """One shard's part of a request."""

    def step(self, may_wait: bool = True) -> bool:
        """Make one attempt, which the server may hold for a while; return whether it ended."""
        ...


class SequentialExecutor:
    """Runs the calls of a request in the calling thread, for transports without threads."""

    def run(self, calls: Sequence[ShardCall], cancellation: Cancellation) -> None:
        """Run all calls.

        Only the last open call may wait: a push is decided once all shards have it.
        """
        remaining = list(calls)
        while remaining:
            last = remaining[-1]
            remaining = [call for call in remaining if not call.step(may_wait=call is last)]

    def close(self) -> None:
        """Do nothing: there are no threads."""


Task = tuple[ShardCall, "Future[None]"]


class ShardExecutor:
    """Runs the calls of a request at the same time.

    The caller's thread runs the first call, and daemon threads run the others.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queues: list[queue.SimpleQueue[Task | None]] = []
        self._threads: list[threading.Thread] = []

    def run(self, calls: Sequence[ShardCall], cancellation: Cancellation) -> None:
        """Run all calls; a failure cancels the others, and the first failure is raised.

        Returns or raises only when no call runs any more: the calls use the caller's memory.
        """
        with interruptible.deferred(cancellation.cancel):
            futures = []
            for number, call in enumerate(calls[1:]):
                futures.append(self._submit(number, call, cancellation))
            try:
                while not calls[0].step():
                    pass
            except BaseException as error:
                cancellation.cancel(error)
            for future in futures:
                _await(future, cancellation)
            if cancellation.cause is not None:
                raise cancellation.cause

    def close(self) -> None:
        """End the threads, which must be idle."""
        for tasks in self._queues:
            tasks.put(None)
        for thread in self._threads:
            thread.join(10.0)
        self._queues, self._threads = [], []

    def _submit(self, number: int, call: ShardCall, cancellation: Cancellation) -> "Future[None]":
        if number == len(self._threads):
            self._add_thread()
        future: Future[None] = Future()
        # Runs before the waiting thread wakes, so that a failure ends the wait for the others.
        future.add_done_callback(lambda done: _cancel_on_failure(done, cancellation))
        self._queues[number].put((call, future))
        return future

    def _add_thread(self) -> None:
        tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        name = f"{self._name}-{len(self._threads) + 1}"
        thread = threading.Thread(target=_work, args=(tasks,), name=name, daemon=True)
        self._queues.append(tasks)
        self._threads.append(thread)
        thread.start()


def _await(future: "Future[None]", cancellation: Cancellation) -> None:
    while not future.done():
        try:
            interruptible.settle(future)
        except BaseException as interrupt:
            # Ctrl-C: end the calls, but still wait, as the calls use the caller's memory.
            cancellation.cancel(interrupt)


def _work(tasks: "queue.SimpleQueue[Task | None]") -> None:
    while (task := tasks.get()) is not None:
        call, future = task
        try:
            while not call.step():
                pass
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)
        # A finished task must not keep its gradients alive until the next task arrives.
        del task, call, future


def _cancel_on_failure(future: "Future[None]", cancellation: Cancellation) -> None:
    if (error := future.exception()) is not None:
        cancellation.cancel(error)
