"""Steps whose push is decided while the script computes the next gradient.

Theory of operation:

- `push` waits for the push before, loads its weights, and hands its own push to a thread.
- So the weights of a push reach the model one step later, and are one version older.
- A buffer that returns as it was sent keeps what the model has made of it since then. One that
  other workers have changed is replaced.
- A push that fails in its thread stays, and the next wait tries it again. So it counts once.
- If the job's policy becomes sync, each `push` waits for its own outcome.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import ClassVar

from pscommon.core.errors import FencedError, PSError, UnreachableError
from pscommon.core.partition import ByteRange
from pscommon.system import signals as interruptible
from pscommon.tracing.recorder import worker_spans
from psworker.core.results import PushResult, lost
from psworker.model.adapter import ModelAdapter
from psworker.session.drain import DrainedError
from psworker.steps.step import PlainStep, Push, StepContext
from psworker.steps.weight_gates import add_state_gates


@dataclass(slots=True)
class PushInFlight:
    """A push that its thread sends.

    Attributes:
        push: The push.
        absent: Trainable tensors without a gradient.
        base: Version of the weights that its gradient was computed from.
        future: Its outcome; None if it has failed and must be sent again.
    """

    push: Push
    absent: frozenset[int]
    base: int
    future: "Future[PushResult] | None" = None


class PipelinedStep(PlainStep):
    """A step whose push is in flight while the script computes. See the module."""

    is_deferred: ClassVar[bool] = True
    _adapter: ModelAdapter

    def __init__(self, context: StepContext) -> None:
        super().__init__(context)
        self._client = context.client
        self._record_outcome = context.record_outcome
        self._in_flight: PushInFlight | None = None
        self._hooks = add_state_gates(context.model, context.wait)

    def push(self, push: Push) -> None:
        base, result = self.version, self._receive()
        began = worker_spans.now()
        ranges = self._adapter.received_ranges()
        absent = self._adapter.gather()  # before the weights are loaded, and buffers with them
        if began:
            worker_spans.add_of_step("gather", began)
        if result is not None:
            self._load(result, ranges)
        self._start(PushInFlight(push, absent, base))
        if self._client.policy == "sync":
            self.settle()

    def pull(self) -> None:
        self.settle()
        super().pull()

    def settle(self) -> None:
        if (result := self._receive()) is not None:
            self._adapter.reattach()
            self._load(result, self._adapter.received_ranges())

    def drop(self, error: PSError) -> None:
        """Count a push in flight if it has ended; else its batches went back."""
        if self._in_flight is None or self._in_flight.future is None:
            self._lose(error)
        with suppress(FencedError, UnreachableError, DrainedError):
            self.settle()
        self._lose(error)

    def _lose(self, error: PSError) -> None:
        flight, self._in_flight = self._in_flight, None
        if flight is not None:
            self._record_outcome(replace(flight.push, batches=()), lost(error, self.version))

    def close(self) -> None:
        """Remove the hooks. The servers decide on a push that is still in flight."""
        for hook in self._hooks:
            hook.remove()

    def _receive(self) -> PushResult | None:
        """Wait for the push in flight; its weights are then in host memory."""
        if self._in_flight is None:
            return None
        future = self._in_flight.future or self._start(self._in_flight)
        interruptible.settle(future)
        if future.exception() is not None:
            self._in_flight.future = None
        return future.result()

    def _load(self, result: PushResult, ranges: Sequence[ByteRange]) -> None:
        flight, self._in_flight = self._in_flight, None
        assert flight is not None
        began = worker_spans.now()
        self._adapter.weights.from_host(ranges)
        if began:
            worker_spans.add_of_step("scatter", began)
        self.version = result.version
        self._record_outcome(flight.push, result)

    def _start(self, flight: PushInFlight) -> "Future[PushResult]":
        future: Future[PushResult] = Future()
        self._in_flight, flight.future = flight, future
        # a daemon: a script that fails must be able to end
        threading.Thread(
            target=self._send, args=(flight, future), name="paramserver-push", daemon=True
        ).start()
        return future

    def _send(self, flight: PushInFlight, future: "Future[PushResult]") -> None:
        push = flight.push
        try:
            result = self._model.exchange(
                gradients=self._adapter.gradients.memory,
                weights=self._adapter.weights.memory,
                absent=flight.absent,
                samples=push.samples,
                batches=push.batches,
                groups_json=push.groups_json,
                base=flight.base,
            )
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
