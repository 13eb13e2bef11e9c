"""The job's model as named numpy arrays."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pscommon.core.errors import InvalidRequestError
from pscommon.core.model_spec import OptimizerSettings
from pscommon.system.thread_team import ThreadTeam, cores
from psworker.client.arrays import Array, ArrayBuffer, Arrays, Gradients, spec_of
from psworker.core.results import PushResult
from psworker.exchange.model_exchange import ModelExchange
from psworker.session import metrics
from psworker.session.drain import Drain, DrainedError
from psworker.session.step_stats import StepStats


class ArrayModel:
    """The array methods of `Client`, which documents their arguments."""

    def __init__(self, exchange: ModelExchange, observes: bool, drain: Drain) -> None:
        self._exchange = exchange
        self._observes = observes
        self._drain = drain
        self._weights: ArrayBuffer | None = None
        self._gradients: ArrayBuffer | None = None
        self._has_made_last_push = False
        self._stats = StepStats()
        self._team = ThreadTeam(min(2, cores()), "copy-arrays")

    def register(
        self, params: Arrays, optimizer: OptimizerSettings, buffers: Arrays, frozen: Arrays
    ) -> None:
        exchange = self._exchange
        with exchange.lock:
            plan = exchange.agree(spec_of(params, buffers, frozen, optimizer))
            weights = ArrayBuffer(plan, exchange.buffers.weights, self._team)
            weights.write({**params, **buffers, **frozen})
            exchange.start(weights.memory)
            self._weights = weights
            self._gradients = ArrayBuffer(plan, exchange.buffers.gradients, self._team)
            self._stats.enter("compute")

    def pull(self, out: Mapping[str, Array] | None) -> dict[str, Array]:
        with self._exchange.lock:
            weights = self.weights
            weights.check_out(out or {})
            with self._timed("pull"):
                self._exchange.exchange(None, weights.memory)
            return weights.read(out)

    def push_pull(
        self, grads: Gradients, out: Mapping[str, Array] | None, samples: int
    ) -> PushResult:
        with self._exchange.lock:
            self.weights.check_out(out or {})
            result = self.push(grads, samples, pulls=True)
            if out is not None:
                self.weights.read(out)
            return result

    def push(self, grads: Gradients, samples: int, pulls: bool = False) -> PushResult:
        with self._exchange.lock:
            weights = self.weights
            if self._gradients is None:
                raise InvalidRequestError("an observer cannot push")
            if self._has_made_last_push:
                raise DrainedError(
                    "this worker was asked to leave (client.stopping), and has made its last push"
                )
            self._has_made_last_push = self._drain.asked
            absent = self._gradients.write_gradients(grads, weights)
            with self._timed("push"):
                result = self._exchange.exchange(
                    self._gradients.memory, weights.memory if pulls else None, absent, samples
                )
            self._stats.finish_step(samples, result.seconds)
            metrics.step({phase: self._stats.last[phase] for phase in metrics.PHASES}, samples)
            return result

    @property
    def weights(self) -> ArrayBuffer:
        """The last pulled weights; an observer pulls them first."""
        if self._weights is None and self._observes:
            plan = self._exchange.agree(None)
            weights = ArrayBuffer(plan, self._exchange.buffers.weights, self._team)
            self._exchange.start(weights.memory)
            self._weights = weights
        if self._weights is None:
            raise InvalidRequestError("no model is registered. Try: call register first")
        return self._weights

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        self._stats.enter(phase)
        try:
            yield
        finally:
            self._stats.enter("compute")
