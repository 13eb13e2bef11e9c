"""The job's model as named numpy arrays."""

from collections.abc import Mapping, Sequence

from pscommon.core.errors import InvalidRequestError
from pscommon.core.model_spec import OptimizerSettings
from pscommon.system.thread_team import ThreadTeam, cores
from psworker.client.arrays import Array, ArrayBuffer, Arrays, Gradients, overlap, spec_of
from psworker.core.results import PushResult
from psworker.exchange.model_exchange import ModelExchange
from psworker.exchange.transfer import ExchangeBuffer
from psworker.session import metrics
from psworker.session.arguments import check_integer
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
        self._are_weights_in_out = False  # the weights pulled last are in arrays of the caller
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
            weights = self.buffer()
            weights.check_out(out or {})
            direct = self._usable(weights, out or {})
            self._stats.enter("pull")
            try:
                self._exchange.exchange(None, weights.with_arrays(direct))
            finally:
                self._stats.enter("compute")
            self._are_weights_in_out = out is not None
            return weights.read(out, direct)

    def push_pull(
        self, grads: Gradients, out: Mapping[str, Array] | None, samples: int
    ) -> PushResult:
        with self._exchange.lock:
            weights = self.buffer()
            weights.check_out(out or {})
            given, absent = self._check_push(grads)
            # a push without some gradients pulls what has changed: the buffer has the rest
            into = self._usable(weights, out or {}) if not absent else {}
            result = self._push(given, absent, into, weights.with_arrays(into), samples)
            self._are_weights_in_out = out is not None
            if out is not None:
                weights.read(out, into)
            return result

    def push(self, grads: Gradients, samples: int) -> PushResult:
        with self._exchange.lock:
            given, absent = self._check_push(grads)
            return self._push(given, absent, {}, None, samples)

    def _check_push(self, grads: Gradients) -> tuple[dict[str, Array], list[int]]:
        """Return the arrays of a push, and the indices of tensors without a gradient."""
        self.buffer()
        if self._gradients is None:
            raise InvalidRequestError("an observer cannot push")
        if self._has_made_last_push:
            raise DrainedError(
                "this worker was asked to leave (client.stopping), and has made its last push"
            )
        given = self._gradients.check_gradients(grads)
        return given, self._gradients.absent(given)

    def _push(
        self,
        given: Arrays,
        absent: Sequence[int],
        into: Arrays,
        weights: ExchangeBuffer | None,
        samples: int,
    ) -> PushResult:
        """Push. `into`: the arrays of the caller in `weights`, into which weights are pulled."""
        assert self._gradients is not None
        source = self._usable(self._gradients, given)
        if source and into and overlap(source, into):  # after a lost connection both are needed
            source = {}
        gradients = self._gradients.write_gradients(given, self.buffer(), source)
        is_last = self._drain.asked
        self._stats.enter("push")
        try:
            samples = check_integer("samples", samples, 1)
            result = self._exchange.exchange(gradients, weights, absent, samples)
        except BaseException:
            self._stats.enter("compute")
            raise
        self._has_made_last_push = is_last
        self._stats.finish_step(samples, result.seconds)
        metrics.step(self._stats.last, samples)
        return result

    def _usable(self, buffer: ArrayBuffer, arrays: Arrays) -> dict[str, Array]:
        """Return the arrays to use in place; none while servers use the shared memory."""
        return {} if self._exchange.buffers.shards else buffer.usable_in_place(arrays)

    @property
    def weights(self) -> dict[str, Array]:
        weights = self.buffer()
        if self._are_weights_in_out:
            raise InvalidRequestError("the last pull went into `out`: the weights are there")
        return dict(weights.tensors)

    def buffer(self) -> ArrayBuffer:
        """Return the flat buffer of weights; an observer pulls them first."""
        if self._weights is None and self._observes:
            plan = self._exchange.agree(None)
            weights = ArrayBuffer(plan, self._exchange.buffers.weights, self._team)
            self._exchange.start(weights.memory)
            self._weights = weights
        if self._weights is None:
            raise InvalidRequestError("no model is registered. Try: call register first")
        return self._weights
