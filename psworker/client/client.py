"""The framework-free client.

The model is a set of numpy arrays (register, pull, push) or a flat buffer (agree, start,
exchange).
"""

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Never, Self, SupportsFloat

from pscommon.core.data_stream import Spec
from pscommon.core.errors import InvalidRequestError
from pscommon.core.log_entries import BatchKey
from pscommon.core.model_spec import ModelSpec, OptimizerSettings
from pscommon.core.partition import PartitionPlan
from pscommon.settings.values import Lanes
from psproto.v1 import coordinator_pb2 as co
from psworker.client.arrays import Array, ArrayBuffer, Arrays, Gradients, spec_of
from psworker.client.batch_client import BatchClient
from psworker.connection import finalizer as forgotten
from psworker.connection.client_facts import ClientFacts
from psworker.connection.connection import connected
from psworker.connection.membership import StepProgress
from psworker.connection.retry import TimeLimits
from psworker.core.results import Lease, PushResult
from psworker.exchange.buffered_push import BufferedPush
from psworker.exchange.model_exchange import ModelExchange
from psworker.exchange.open_push import OpenPush
from psworker.session import metrics
from psworker.session.arguments import attempt_of, connect_timeout_of, lanes_of, rank_of, time_limit
from psworker.session.drain import DrainedError
from psworker.session.step_stats import StepStats
from psworker.transport.grpc import Transport

COMES_BACK = "comes back as a new worker"


class Client(ClientFacts):
    """A worker's connection to all servers of a job, for numpy arrays.

    Calls of several threads run one after another. Processes that are forked later, such as those
    of a DataLoader, may run and end freely, but cannot use or make a Client: gRPC does not
    survive a fork.

    Args:
        servers: "HOST:PORT,..." or a sequence of them; one is enough. None: PS_SERVERS, and then
            PS_JOB, PS_WORKER_RANK and PS_CONNECT_TIMEOUT count as well.
        rank: Place in the sum of a round, among workers that start together.
        device: The device on which this worker computes, for the status.
        observe: Only read (status, pull), without a membership.
        connect_timeout: Seconds that a server may be silent. Default: 60.
        wait_timeout: Seconds to wait for other workers.
        lanes: "grpc", "shm" or "auto". Default: PS_LANES, then auto.
        lane: A transport to use instead of servers, for simulations.

    Raises:
        UnreachableError: A server does not answer. Any call may raise this and the following
            errors.
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
    ) -> None:
        environment = os.environ if servers is None and lane is None else {}
        limits = TimeLimits(
            connect_timeout_of(connect_timeout, environment),
            time_limit("wait_timeout", wait_timeout),
        )
        rank = rank_of(rank, environment)
        super().__init__(connected(servers, lane, environment, limits))
        if not self._connection.lane.direct:  # a direct transport has no threads to end
            forgotten.watch(self, self._connection)
        self._observes = observe
        chosen = "grpc" if self._connection.lane.direct else lanes_of(lanes, os.environ)
        self._model = ModelExchange(self._connection, observe, chosen)
        self._data = BatchClient(self._connection, self._model)
        self._weights: ArrayBuffer | None = None
        self._gradients: ArrayBuffer | None = None
        self._leaves = False
        self._stats = StepStats()  # of `push`; callers of `exchange` keep their own
        if not observe:
            self._join(rank, device)

    def _join(self, rank: int | None, device: str) -> None:
        try:
            self._connection.join(rank, attempt_of(os.environ), device)
        except BaseException:
            self._connection.close()
            raise

    @property
    def plan(self) -> PartitionPlan:
        """Partition of the model's bytes; InvalidRequestError before a model is registered."""
        return self._model.plan

    @property
    def version(self) -> int:
        """Version of the weights that were pulled last, the smallest over the shards."""
        return self._model.version

    @property
    def groups_json(self) -> str:
        """The optimizer's parameter groups as they stood when the model was registered."""
        return self._model.groups_json

    def drain(self) -> None:
        """Ask this worker to leave, as SIGTERM to ps-worker does. Call it from any thread."""
        self._connection.drain.ask()

    @property
    def stopping(self) -> bool:
        """True if the job ends or this worker was asked to leave: finish the step, then close."""
        return self._connection.place.stopping or self.draining

    # ---- numpy arrays ----------------------------------------------------------------------------

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
        with self._model.turn:
            arrays = {**params, **(buffers or {}), **(frozen or {})}
            plan = self.agree(spec_of(params, buffers or {}, frozen or {}, optimizer))
            gradients, memory = self.tapes()
            weights = ArrayBuffer(plan, memory)
            weights.write(arrays)
            self.start(memory)
            self._weights, self._gradients = weights, ArrayBuffer(plan, gradients)
            self._stats.enter("compute")

    def pull(self, out: Mapping[str, Array] | None = None) -> dict[str, Array]:
        """Return the newest weights, buffers and frozen tensors by name.

        They are at least as new as this client's last push. The bits of a bfloat16 tensor come as
        uint16.

        Args:
            out: Arrays to fill. None: new arrays.
        """
        with self._model.turn:
            tape = self._known_weights()
            tape.check_out(out or {})
            with self._timed("pull"):
                self.exchange(gradients=None, weights=tape.memory)
            return tape.read(out)

    def push(self, grads: Gradients, samples: int = 1) -> PushResult:
        """Send gradients by name, wait for the policy's decision, and return the result.

        After an UnreachableError or WaitTimeoutError it is unknown whether the push counted. A
        second call with the same arguments counts it once.

        Args:
            gradients: By name. A tensor that is missing or None got no gradient: its optimizer
                state stays as it is. Buffers may be among them, with their new values.
            samples: Weight in the average of a round.

        Raises:
            InvalidRequestError: An unknown tensor, or another shape or dtype; nothing was sent.
                NaN and Inf make the result "rejected".
        """
        return self._push(grads, samples, pull=False)

    def push_pull(
        self, grads: Gradients, out: Mapping[str, Array] | None = None, samples: int = 1
    ) -> PushResult:
        """Push, then pull, in one round trip. The weights go into `out`, or stay in `weights`."""
        with self._model.turn:
            self._known_weights().check_out(out or {})
            result = self._push(grads, samples, pull=True)
            if out is not None:
                self._known_weights().read(out)
            return result

    @property
    def weights(self) -> dict[str, Array]:
        """Last pulled weights by name, without a copy: the next pull changes them."""
        return dict(self._known_weights().tensors)

    def _push(self, grads: Gradients, samples: int, pull: bool) -> PushResult:
        with self._model.turn:
            weights = self._known_weights()
            if self._gradients is None:
                raise InvalidRequestError("an observer cannot push")
            if self._leaves:
                raise DrainedError(
                    "this worker was asked to leave (client.stopping), and has made its last push"
                )
            self._leaves = self.draining
            absent = self._gradients.write_gradients(grads, weights)
            with self._timed("push"):
                result = self.exchange(
                    gradients=self._gradients.memory,
                    weights=weights.memory if pull else None,
                    absent=absent,
                    samples=samples,
                )
            self._stats.finish_step(samples, result.seconds)
            metrics.step({phase: self._stats.last[phase] for phase in metrics.PHASES}, samples)
            return result

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        self._stats.enter(phase)
        try:
            yield
        finally:
            self._stats.enter("compute")

    def _known_weights(self) -> ArrayBuffer:
        if self._weights is None and self._observes:
            plan = self._model.agree(None)
            weights = ArrayBuffer(plan, self.tapes()[1])
            self.start(weights.memory)
            self._weights = weights
        if self._weights is None:
            raise InvalidRequestError("no model yet: call register first")
        return self._weights

    # ---- flat buffers ----------------------------------------------------------------------------

    def agree(self, spec: ModelSpec) -> PartitionPlan:
        """Register the model and return its partition, in the job's order of tensors.

        Waits for the first worker's weights, unless this worker is the first.

        Raises:
            MismatchError: The job trains another model; the message shows the differences by
                tensor.
        """
        return self._model.agree(spec)

    def tapes(self) -> tuple[memoryview, memoryview]:
        """Return flat buffers for gradients and for weights, plan.nbytes each.

        They are the fastest memory for start and exchange: servers on this host access it
        directly. Between calls the caller may use it.
        """
        tapes = self._model.tapes
        return tapes.gradients, tapes.weights

    def start(self, tape: memoryview) -> None:
        """Upload the weights if this worker is the job's first, then load the job's weights.

        Args:
            tape: Writable flat buffer of plan.nbytes bytes.
        """
        self._model.start(tape)

    def exchange(
        self,
        *,
        gradients: memoryview | None,
        weights: memoryview | None,
        absent: Collection[int] = (),
        samples: int = 1,
        batches: Sequence[BatchKey] = (),
        groups_json: str = "",
        base: int | None = None,
    ) -> PushResult:
        """Push, pull, or both, with flat buffers of plan.nbytes bytes.

        Only trainable tensors and buffers are transferred. After an error `weights` may hold a
        mixture of versions: pull again.

        Args:
            gradients: Bytes to push; None: no push.
            weights: Writable bytes for the pull; None: no pull.
            absent: Trainable tensors without a gradient, by index into plan.spec.tensors.
            samples: Weight in a round's average, at least 1.
            batches: Batches that the push commits.
            groups_json: The optimizer's parameter groups, if they may have changed; else empty.
            base: Version that the gradient was computed from; None: the last pulled version.

        Returns:
            The outcome of the push; "none" without a push.
        """
        return self._model.exchange(gradients, weights, absent, samples, batches, groups_json, base)

    def begin(self) -> OpenPush | BufferedPush:
        """Open a push from and a pull into `tapes()`, byte range by byte range.

        Only one can be open. See `psworker.core.protocols.PushStream`.
        """
        return self._model.begin(*self.tapes())

    # ---- data and membership ---------------------------------------------------------------------

    def next_batches(
        self, loop: Spec, count: int = 1, idle: bool = False, first_open: int | None = None
    ) -> Lease:
        """Lease up to `count` batches of a loop.

        Args:
            loop: The loop.
            count: Largest number of batches.
            idle: The worker has no batch: wait for one or for the loop's end, and sit out of
                rounds meanwhile. False: return at once, perhaps without batches.
            first_open: Number of the first loop that the script is in or may still begin; None:
                this loop. Batches left in earlier loops go to other workers, and are dropped
                once all workers have passed those loops.
        """
        return self._data.take(loop, count, idle, loop.loop if first_open is None else first_open)

    def share(self, loop: Spec) -> int:
        """Return how many of a loop's batches this worker can expect.

        The number assumes the workers that are registered now.
        """
        return self._data.share(loop)

    def return_batches(self, batches: Sequence[BatchKey]) -> None:
        """Return unused batches, so that other workers may lease them."""
        self._data.give_back(batches)

    def drop_batches(self, batches: Sequence[BatchKey]) -> None:
        """Mark batches as used without a push, so that no other worker leases them."""
        self._data.give_back(batches, used=True)

    def report(self, **values: SupportsFloat) -> None:
        """Report values for the job's summary, metrics and logs."""
        numbers = {name: float(value) for name, value in values.items()}
        request = co.ReportMetricsRequest(job=self.job, worker=self.worker, metrics=numbers)
        connection = self._connection
        connection.call(
            "reporting", lambda: connection.lane.report(request, connection.call_seconds)
        )
        for name, value in numbers.items():
            metrics.reported(name, value)

    def report_soon(self, values: Mapping[str, Any]) -> None:
        """Report values with the next heartbeat.

        At most one value per second and name is sent, and always the newest.
        """
        self._connection.touch()
        self._connection.reports.add(values, self.version)

    def send_reports(self) -> None:
        """Send now what `report_soon` has left to the next heartbeat."""
        self._connection.send_reports()

    def progress(
        self, *, steps: int, step_seconds: float, samples_per_second: float, phase: str
    ) -> None:
        """Set what the next heartbeat reports for the status.

        Args:
            steps: Number of finished steps.
            step_seconds: Duration of the last step.
            samples_per_second: Throughput of the last step.
            phase: "compute", "push", "data" or "idle".
        """
        self._connection.reports.settle()
        self._connection.show(StepProgress(steps, step_seconds, samples_per_second, phase))

    def status(self) -> dict[str, Any]:
        """Return the job as `ps-ctl status --output json` shows it."""
        connection, request = self._connection, co.GetStatusRequest()
        answer = connection.call(
            "asking for the status",
            lambda: connection.lane.status(request, connection.call_seconds),
        )
        found: dict[str, Any] = json.loads(answer.status_json)
        return found

    def newest(self) -> tuple[PartitionPlan, memoryview]:
        """Return the job's newest model: its partition and a new flat buffer.

        The weights and the version of this client do not change.
        """
        lane = self._connection.lane
        given: dict[str, Any] = {"lane": lane} if lane.direct else {"servers": lane.addresses}
        with Client(observe=True, **given) as observer:
            observer._connection.place.job = self.job
            memory = observer._known_weights().memory
            return observer.plan, memory

    def rejoin(self) -> None:
        """Join again as a new worker after a FencedError, with the registered model.

        What the old worker had not pushed is lost, and its leased batches went back. Pull before
        you compute.

        Raises:
            MismatchError: The servers run another job or model now.
            FencedError: The servers have lost the job's weights.
            QuarantinedError: Too many gradients of this worker were bad (--quarantine-after).
        """
        with self._model.turn:
            self._model.check_idle()
            self._connection.place.check_curable()
            self._model.come_back(COMES_BACK)

    def retire(self, reason: str = "") -> None:
        """Leave the rounds as `leave` does; pulls, reports and status work until `close`.

        Args:
            reason: Why the worker leaves; empty if it is done.
        """
        with self._model.turn:
            self._model.check_idle()
            self._model.change_place(reason)

    def leave(self, reason: str = "") -> None:
        """Leave the job: no process waits for this worker any more. May be repeated.

        Args:
            reason: Why the worker leaves; empty if it is done.
        """
        self._connection.leave(reason)

    def close(self) -> None:
        """Leave the job as done, and free threads and connections. May be repeated."""
        self._model.abandon()
        self._connection.close()
        self._model.close()

    def __reduce__(self) -> Never:
        raise InvalidRequestError(
            "a Client is its process's connection and cannot be pickled or copied: give another "
            "process the servers' addresses, and let it make a Client of its own"
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
