"""The framework-free client: the model is a set of numpy arrays, by name."""

import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Never, Self

from pscommon.core.errors import InvalidRequestError
from pscommon.core.limits import ALLREDUCE
from pscommon.core.model_spec import OptimizerSettings
from pscommon.core.partition import PartitionPlan
from pscommon.settings.values import Lanes
from pscommon.system.thread_team import ThreadTeam, cores
from psworker.client.arrays import Array, ArrayBuffer, Arrays, Gradients, overlap, spec_of
from psworker.client.worker_client import WorkerClient
from psworker.connection.connection import close_after, connected
from psworker.connection.retry import TimeLimits
from psworker.core.results import PushResult
from psworker.exchange.transfer import ExchangeBuffer
from psworker.session import metrics
from psworker.session.arguments import (
    attempt_of,
    check_integer,
    connect_timeout_of,
    lanes_of,
    rank_of,
    time_limit,
)
from psworker.session.drain import DrainedError
from psworker.session.step_stats import StepStats
from psworker.transport.interface import Transport


class Client(WorkerClient):
    """A worker's connection to all servers of a job, for numpy arrays.

    Calls of several threads run one after another. Processes that are forked later, such as those
    of a DataLoader, may run and end freely, but cannot use or make a Client: gRPC does not
    survive a fork.

    Where servers use TLS or tokens, PS_TLS_CA, PS_TLS_CERT, PS_TLS_KEY, PS_TOKEN_FILE and
    PS_INSECURE count as for `psworker.connect`.

    Args:
        servers: "HOST:PORT,..." or a sequence of them; one is enough. None: PS_SERVERS, and then
            PS_JOB, PS_WORKER_RANK and PS_CONNECT_TIMEOUT count as well.
        rank: Place in the sum of a round, among workers that start together.
        device: The device on which this worker computes, for the status.
        observe: Only read (status, pull), without a membership.
        connect_timeout: Seconds that a server may be silent. Default: 60.
        wait_timeout: Seconds to wait for other workers.
        lanes: "auto", "shm", "stream" or "grpc". Default: PS_LANES, then auto.
        lane: A transport to use instead of servers, for simulations.
        training: Name of the script's training, see `psworker.connect`; empty: that of the job.

    Raises:
        AuthenticationError: The servers refuse this process's certificate or token, or it refuses
            theirs.
        UnreachableError: A server does not answer. Any call may raise this and what follows.
        WaitTimeoutError: Another worker is late; the message names it.
        FencedError: The job went on without this worker; `rejoin` brings it back.
        QuarantinedError: Too many gradients of this worker were bad; it cannot rejoin.
        MismatchError: The servers are not the complete set of one job, or run another job.
        DrainedError: This worker was asked to leave, and the call would wait long for others.
        InvalidRequestError: An argument does not fit.
    """

    def __init__(
        self,
        servers: str | Sequence[str] | None = None,
        *,
        rank: int | None = None,
        device: str = "cpu",
        observe: bool = False,
        connect_timeout: float | None = None,
        wait_timeout: float = 600.0,
        lanes: Lanes | None = None,
        lane: Transport | None = None,
        training: str = "",
    ) -> None:
        environment = os.environ if servers is None and lane is None else {}
        limits = TimeLimits(
            connect_timeout_of(connect_timeout, environment),
            time_limit("wait_timeout", wait_timeout),
        )
        rank = rank_of(rank, environment)
        lanes = lanes_of(lanes, os.environ)
        connection = connected(servers, lane, environment, limits, lanes)
        direct = connection.transport.direct
        super().__init__(connection, observe, "grpc" if direct else lanes)
        if not direct:  # a direct transport has no threads to end
            close_after(self, connection)
        self._observes = observe
        self._weights: ArrayBuffer | None = None
        self._gradients: ArrayBuffer | None = None
        self._are_weights_in_out = False  # the weights pulled last are in arrays of the caller
        self._has_made_last_push = False
        self._stats = StepStats()
        self._team = ThreadTeam(min(2, cores()), "copy-arrays")
        if not observe:
            connection.join(rank, attempt_of(os.environ), device, training)

    def register(
        self,
        params: Arrays,
        optimizer: OptimizerSettings,
        *,
        buffers: Arrays | None = None,
        frozen: Arrays | None = None,
    ) -> None:
        """Register the model. The first worker's values are the initial weights; others must match.

        Args:
            params: Arrays that get gradients, by name; floats.
            optimizer: The optimizer that the servers run.
            buffers: Running statistics. They travel by value with each push and are averaged.
                Floats, integers or bool.
            frozen: Arrays that never change. Floats, integers or bool.

        Raises:
            MismatchError: The job trains another model; the message shows the differences by
                tensor.
            UnsupportedOptimizerError: The servers cannot run this optimizer.
            NonFiniteError: An initial value is NaN or Inf.
        """
        buffers, frozen, model = buffers or {}, frozen or {}, self.model
        with model.lock:
            plan = model.agree(spec_of(params, buffers, frozen, optimizer))
            buffer = model.shards.buffers
            weights = ArrayBuffer(plan, buffer.weights, self._team)
            weights.write({**params, **buffers, **frozen})
            model.start(weights.memory)
            self._weights = weights
            self._gradients = ArrayBuffer(plan, buffer.gradients, self._team)
            self._stats.enter("compute")

    def pull(self, out: Mapping[str, Array] | None = None) -> dict[str, Array]:
        """Return the newest weights, buffers and frozen tensors by name.

        They are at least as new as this client's last push. The bits of a bfloat16 tensor come as
        uint16.

        Args:
            out: Arrays to fill. None: new arrays.
        """
        with self.model.lock:
            weights = self._buffer()
            weights.check_out(out or {})
            direct = self._usable(weights, out or {})
            self._stats.enter("pull")
            try:
                self.model.exchange(gradients=None, weights=weights.with_arrays(direct))
            finally:
                self._stats.enter("compute")
            self._are_weights_in_out = out is not None
            return weights.read(out, direct)

    def push(self, grads: Gradients, samples: int = 1) -> PushResult:
        """Send gradients by name, wait for the policy's decision, and return the result.

        After an UnreachableError or WaitTimeoutError it is unknown whether the push counted. A
        second call with the same arguments counts it once.

        Args:
            grads: By name. A tensor that is missing or None got no gradient: its optimizer
                state stays as it is. Buffers may be among them, with their new values.
            samples: Weight in the average of a round.

        Raises:
            InvalidRequestError: An unknown tensor, or another shape or dtype; nothing was sent.
                NaN and Inf make the result "rejected".
        """
        with self.model.lock:
            given, absent = self._check_push(grads)
            return self._push(given, absent, {}, None, samples)

    def push_pull(
        self, grads: Gradients, out: Mapping[str, Array] | None = None, samples: int = 1
    ) -> PushResult:
        """Push, then pull, in one round trip. The weights go into `out`, or stay in `weights`."""
        with self.model.lock:
            weights = self._buffer()
            weights.check_out(out or {})
            given, absent = self._check_push(grads)
            # a push without some gradients pulls what has changed: the buffer has the rest
            into = self._usable(weights, out or {}) if not absent else {}
            result = self._push(given, absent, into, weights.with_arrays(into), samples)
            self._are_weights_in_out = out is not None
            if out is not None:
                weights.read(out, into)
            return result

    @property
    def weights(self) -> dict[str, Array]:
        """Last pulled weights by name, without a copy: the next pull changes them.

        Raises InvalidRequestError if they went into `out`.
        """
        weights = self._buffer()
        if self._are_weights_in_out:
            raise InvalidRequestError("the last pull went into `out`: the weights are there")
        return dict(weights.tensors)

    def _check_push(self, grads: Gradients) -> tuple[dict[str, Array], list[int]]:
        """Return the arrays of a push, and the indices of tensors without a gradient."""
        if self._gradients is None:
            self._buffer()
            raise InvalidRequestError("an observer cannot push")
        if self._has_made_last_push:
            raise DrainedError(
                "this worker was asked to leave (client.stopping), and has made its last push"
            )
        if self.policy == ALLREDUCE:
            raise InvalidRequestError(
                "push refused: policy allreduce needs the torch optimizer of psworker.Job. "
                "Try: policy sync"
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
        assert self._weights is not None
        source = self._usable(self._gradients, given)
        if source and into and overlap(source, into):  # after a lost connection both are needed
            source = {}
        gradients = self._gradients.write_gradients(given, self._weights, source)
        is_last = self._connection.drain.asked
        self._stats.enter("push")
        try:
            samples = check_integer("samples", samples, 1)
            result = self.model.exchange(
                gradients=gradients, weights=weights, absent=absent, samples=samples
            )
        except BaseException:
            self._stats.enter("compute")
            raise
        self._has_made_last_push = is_last
        self._stats.finish_step(samples, result.seconds)
        metrics.step(self._stats.last, samples)
        self._connection.membership.progress = self._stats.progress()
        return result

    def _usable(self, buffer: ArrayBuffer, arrays: Arrays) -> dict[str, Array]:
        """Return the arrays to use in place; none while servers use the shared memory."""
        return {} if self.model.shards.buffers.shards else buffer.usable_in_place(arrays)

    def _buffer(self) -> ArrayBuffer:
        """Return the flat buffer of weights; an observer pulls them first."""
        if self._weights is None and self._observes:
            plan = self.model.agree(None)
            weights = ArrayBuffer(plan, self.model.shards.buffers.weights, self._team)
            self.model.start(weights.memory)
            self._weights = weights
        if self._weights is None:
            raise InvalidRequestError("no model is registered. Try: call register first")
        return self._weights

    def newest(self) -> tuple[PartitionPlan, memoryview, int]:
        """Return the job's newest model: its partition, a new flat buffer, and the version.

        The weights and the version of this client do not change.
        """
        transport = self._connection.transport
        servers: dict[str, Any] = (
            {"lane": transport} if transport.direct else {"servers": transport.addresses}
        )
        with Client(observe=True, **servers) as observer:
            observer._connection.membership.job = self.job
            memory = observer._buffer().memory
            return observer.plan, memory, observer.version

    def __reduce__(self) -> Never:
        raise InvalidRequestError(
            "a Client cannot be pickled or copied: it is the connection of its process. Try: give "
            "the other process the servers' addresses, and create a Client there"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None and not issubclass(kind, DrainedError):
            self.leave(f"failed: {kind.__name__}")
        self.close()
