"""Steps that end while the next gradient is being computed."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace

from torch import nn

from pscommon.core.errors import FencedError, PSError, UnreachableError
from pscommon.core.partition import ByteRange
from pscommon.system import signals as interruptible
from psworker.core.protocols import JobClient
from psworker.core.results import PushResult, lost
from psworker.model.adapter import ModelAdapter
from psworker.optim.step import Push, StepStrategy
from psworker.optim.weight_gates import barriers
from psworker.session.drain import DrainedError


@dataclass(slots=True)
class StepInFlight:
    """A push on its way. base: version of the weights that its gradient was computed from.
    future: None: it failed.
    """

    push: Push
    absent: frozenset[int]
    base: int
    future: "Future[PushResult] | None" = None


class PipelinedStep(StepStrategy):
    """Hands each push to a thread and gets its end at the next one.

    The weights that a push brings reach the model when the next gradient has been computed, from
    those before. A buffer that comes back as it left keeps what the model has made of it since;
    one that others have changed is taken over. decided: told how each push ended, once; may
    raise. A push that fails on its way stays and is tried again, so that it counts once. settle:
    what state_dict waits for. Where the job's policy has become sync, each push waits for its
    end.
    """

    def __init__(
        self,
        bridge: ModelAdapter,
        client: JobClient,
        model: nn.Module,
        decided: Callable[[Push, PushResult], None],
        settle: Callable[[], None],
    ) -> None:
        super().__init__(bridge, client)
        self._decided = decided
        self._flight: StepInFlight | None = None
        self._version = client.version
        self._hooks = barriers(model, settle)

    def push(self, push: Push) -> None:
        base, result = self._version, self._land()
        news = self._bridge.received_ranges()
        absent = self._bridge.gather()  # before the weights come: with them come the buffers
        if result is not None:
            self._unload(result, news)
        self._start(StepInFlight(push, absent, base))
        if self._client.policy == "sync":
            self.settle()

    def pull(self) -> None:
        self.settle()
        super().pull()
        self._version = self._client.version

    def settle(self) -> None:
        if (result := self._land()) is not None:
            self._bridge.reattach()
            self._unload(result, self._bridge.received_ranges())

    def drop(self, error: PSError) -> None:
        """A push that is on its way counts if it has ended; else its batches went back with the
        place.
        """
        if self._flight is None or self._flight.future is None:
            self._lose(error)
        with suppress(FencedError, UnreachableError, DrainedError):
            self.settle()
        self._lose(error)

    def _lose(self, error: PSError) -> None:
        flight, self._flight = self._flight, None
        if flight is not None:
            self._decided(replace(flight.push, batches=()), lost(error, self._version))

    def renew(self) -> None:
        super().renew()
        self._version = self._client.version

    def close(self) -> None:
        """A push that is still on its way counts or not, as the servers decide."""
        for hook in self._hooks:
            hook.remove()

    def _land(self) -> PushResult | None:
        """Waits for the push that is on its way; its weights are then on the host."""
        if self._flight is None:
            return None
        future = self._flight.future or self._start(self._flight)
        interruptible.settle(future)
        if future.exception() is not None:
            self._flight.future = None
        return future.result()

    def _unload(self, result: PushResult, news: Sequence[ByteRange]) -> None:
        flight, self._flight = self._flight, None
        assert flight is not None
        self._bridge.weights.from_host(news)
        self._version = result.version
        self._decided(flight.push, result)

    def _start(self, flight: StepInFlight) -> "Future[PushResult]":
        future: Future[PushResult] = Future()
        self._flight, flight.future = flight, future
        # a daemon: a script that fails must be able to end
        threading.Thread(
            target=self._fly, args=(flight, future), name="paramserver-push", daemon=True
        ).start()
        return future

    def _fly(self, flight: StepInFlight, future: "Future[PushResult]") -> None:
        push = flight.push
        try:
            result = self._client.exchange(
                gradients=self._bridge.gradients.memory,
                weights=self._bridge.weights.memory,
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
