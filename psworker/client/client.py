"""The framework-free client.

The model is a set of numpy arrays (register, pull, push) or a flat buffer (agree, start,
exchange).
"""

import os
from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import Any, Never, Self, SupportsFloat

from pscommon.core.data_stream import Spec
from pscommon.core.errors import InvalidRequestError
from pscommon.core.log_entries import BatchKey
from pscommon.core.model_spec import ModelSpec, OptimizerSettings
from pscommon.core.partition import PartitionPlan
from pscommon.core.script_place import ScriptPlace
from pscommon.settings.values import Lanes
from pscommon.wire.requests import REPORT_METRICS
from psproto.v1 import coordinator_pb2 as co
from psworker.client.array_model import ArrayModel
from psworker.client.arrays import Array, Arrays, Gradients
from psworker.client.batch_client import BatchClient
from psworker.client.collective_client import CollectiveClient
from psworker.connection import finalizer
from psworker.connection.client_facts import ClientFacts
from psworker.connection.connection import connected
from psworker.connection.membership import StepProgress
from psworker.connection.retry import TimeLimits
from psworker.core.results import CollectiveCall, CollectiveResult, Lease, PushResult
from psworker.exchange.model_exchange import ModelExchange
from psworker.exchange.open_push import BufferedPush, OpenPush
from psworker.session import metrics
from psworker.session.arguments import attempt_of, connect_timeout_of, lanes_of, rank_of, time_limit
from psworker.session.drain import DrainedError
from psworker.transport.interface import Transport

REJOIN_REASON = "comes back as a new worker"


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
        lanes: "auto", "shm", "stream" or "grpc". Default: PS_LANES, then auto.
        lane: A transport to use instead of servers, for simulations.
        training: Name of the script's training, see `psworker.connect`; empty: that of the job.

    Raises:
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
        super().__init__(connected(servers, lane, environment, limits, lanes))
        direct = self._connection.transport.direct
        if not direct:  # a direct transport has no threads to end
            finalizer.watch(self, self._connection)
        lanes = "grpc" if direct else lanes
        self._exchange = ModelExchange(self._connection, observe, lanes)
        self._arrays = ArrayModel(self._exchange, observe, self._connection.drain)
        self._data = BatchClient(self._connection, self._exchange)
        self._collectives = CollectiveClient(self._connection)
        if not observe:
            self._connection.join(rank, attempt_of(os.environ), device, training)

    @property
    def plan(self) -> PartitionPlan:
        """Partition of the model's bytes; InvalidRequestError before a model is registered."""
        return self._exchange.plan

    @property
    def version(self) -> int:
        """Version of the weights that were pulled last, the smallest over the shards."""
        return self._exchange.version

    @property
    def groups_json(self) -> str:
        """The optimizer's parameter groups as they stood when the model was registered."""
        return self._exchange.groups_json

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
        self._arrays.register(params, optimizer, buffers or {}, frozen or {})

    def pull(self, out: Mapping[str, Array] | None = None) -> dict[str, Array]:
        """Return the newest weights, buffers and frozen tensors by name.

        They are at least as new as this client's last push. The bits of a bfloat16 tensor come as
        uint16.

        Args:
            out: Arrays to fill. None: new arrays.
        """
        return self._arrays.pull(out)

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
        return self._arrays.push(grads, samples)

    def push_pull(
        self, grads: Gradients, out: Mapping[str, Array] | None = None, samples: int = 1
    ) -> PushResult:
        """Push, then pull, in one round trip. The weights go into `out`, or stay in `weights`."""
        return self._arrays.push_pull(grads, out, samples)

    @property
    def weights(self) -> dict[str, Array]:
        """Last pulled weights by name, without a copy: the next pull changes them.

        Raises InvalidRequestError if they went into `out`.
        """
        return self._arrays.weights

    # ---- flat buffers ----------------------------------------------------------------------------

    def agree(self, spec: ModelSpec) -> PartitionPlan:
        """Register the model and return its partition, in the job's order of tensors.

        Waits for the first worker's weights, unless this worker is the first.

        Raises:
            MismatchError: The job trains another model; the message shows the differences by
                tensor.
        """
        return self._exchange.agree(spec)

    def flat_buffers(self) -> tuple[memoryview, memoryview]:
        """Return flat buffers for gradients and for weights, plan.nbytes each.

        They are the fastest memory for start and exchange: servers on this host access it.
        """
        buffers = self._exchange.buffers
        return buffers.gradients, buffers.weights

    def start(self, weights: memoryview) -> None:
        """Upload the weights if this worker is the job's first, then load the job's weights.

        Args:
            weights: Writable flat buffer of plan.nbytes bytes.
        """
        self._exchange.start(weights)

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
        optimizer: str = "",
    ) -> PushResult:
        """Push, pull, or both, with flat buffers of plan.nbytes bytes.

        Only trainable tensors and buffers are transferred. After an error `weights` may hold a
        mixture of versions: pull again.

        Args:
            gradients: Bytes to push; None: no push.
            weights: Writable bytes for the pull; None: no pull.
            absent: Trainable tensors without a gradient, by index into plan.spec.tensors.
            samples: Weight in a round's average; 0: buffers of version `base`, without an update.
            batches: Batches that the push commits.
            groups_json: Hyper-parameters of the optimizer's groups, for this push alone; empty:
                those of the update before.
            base: Version that the gradient was computed from; None: the last pulled version.
            optimizer: Name of the optimizer whose step this is. `absent` has the trainable
                tensors of the others.

        Returns:
            The outcome of the push; "none" without a push.
        """
        return self._exchange.exchange(
            gradients, weights, absent, samples, batches, groups_json, base, optimizer
        )

    def begin(self) -> OpenPush | BufferedPush:
        """Open a push from and a pull into `flat_buffers()`, byte range by byte range.

        Only one can be open. See `psworker.core.protocols.PushStream`.
        """
        return self._exchange.begin(*self.flat_buffers())

    # ---- data and membership ---------------------------------------------------------------------

    def next_batches(
        self,
        loop: Spec,
        count: int = 1,
        idle: bool = False,
        first_open: ScriptPlace | int | None = None,
    ) -> Lease:
        """Lease up to `count` batches of a loop.

        Args:
            loop: The loop.
            count: Largest number of batches.
            idle: The worker has no batch: wait for one or for the loop's end, and sit out of
                rounds meanwhile. False: return at once, perhaps without batches.
            first_open: Number of the first loop that the script is in or may still begin; None:
                this loop. Other workers get batches left in earlier loops, until all have passed
                them. Or the place of a script, which names the pass; the job gives its number.
        """
        return self._data.lease(loop, count, idle, loop.loop if first_open is None else first_open)

    def share(self, loop: Spec) -> int:
        """Return how many batches of a loop this worker can expect, with the current workers."""
        return self._data.share(loop)

    def return_batches(self, batches: Sequence[BatchKey]) -> None:
        """Return unused batches, so that other workers may lease them."""
        self._data.give_back(batches)

    def drop_batches(self, batches: Sequence[BatchKey]) -> None:
        """Mark batches as used without a push, so that no other worker leases them."""
        self._data.give_back(batches, used=True)

    def collective(
        self, number: int, call: CollectiveCall, first_open: ScriptPlace | int
    ) -> CollectiveResult:
        """Make the call of this number, from 1 on; see `Job.barrier` and `next_batches`."""
        return self._collectives.call(number, call, first_open)

    def report(self, **values: SupportsFloat) -> None:
        """Report values for the job's summary, metrics and logs."""
        numbers, connection = (
            {name: float(value) for name, value in values.items()},
            self._connection,
        )
        request = co.ReportMetricsRequest(job=self.job, worker=self.worker, metrics=numbers)
        connection.call("reporting", REPORT_METRICS, request)
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
            step_seconds, samples_per_second: Duration and throughput of the last step.
            phase: "compute", "push", "data" or "idle".
        """
        self._connection.reports.settle()
        self._connection.set_progress(StepProgress(steps, step_seconds, samples_per_second, phase))

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
            memory = observer._arrays.buffer().memory
            return observer.plan, memory, observer.version

    def rejoin(self) -> None:
        """Join again as a new worker after a FencedError, with the registered model.

        What the old worker had not pushed is lost, and its leased batches went back. Pull before
        you compute.

        Raises:
            MismatchError: The servers run another job or model now.
            FencedError: The servers have lost the job's weights.
            QuarantinedError: Too many gradients of this worker were bad (--quarantine-after).
        """
        with self._exchange.lock:
            self._exchange.check_idle()
            self._connection.membership.check_curable()
            self._exchange.rejoin(REJOIN_REASON)

    def retire(self, reason: str = "") -> None:
        """Leave the rounds as `leave` does; pulls, reports and status work until `close`.

        reason: Why the worker leaves; empty if it is done.
        """
        with self._exchange.lock:
            self._exchange.check_idle()
            self._exchange.replace_membership(reason)

    def leave(self, reason: str = "") -> None:
        """Leave the job: no process waits for this worker any more. reason: as in `retire`."""
        self._connection.leave(reason)

    def close(self) -> None:
        """Leave the job as done, and free threads and connections. May be repeated."""
        self._exchange.abandon()
        self._connection.close()
        self._exchange.close()

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
