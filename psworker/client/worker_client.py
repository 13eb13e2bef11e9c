"""What a worker knows of its job, asks it and tells it, beside the model as arrays."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat

from pscommon.core.errors import WaitTimeoutError
from pscommon.core.partition import PartitionPlan
from pscommon.core.script_place import ScriptPlace
from pscommon.settings.values import Lanes
from pscommon.wire.messages import place_fields
from pscommon.wire.requests import COLLECTIVE, GET_STATUS, REPORT_METRICS
from psproto.v1 import coordinator_pb2 as co
from psworker.client.batch_client import BatchClient
from psworker.connection.connection import Connection
from psworker.connection.membership import LossTicket
from psworker.core.clock import Clock
from psworker.core.group_place import ALONE, GroupPlace
from psworker.core.results import CollectiveCall, CollectiveResult, StepProgress
from psworker.exchange.model_exchange import ModelExchange
from psworker.exchange.reduce_client import ReduceClient
from psworker.session import metrics

REJOIN_REASON = "comes back as a new worker"


class WorkerClient:
    """One worker's client of a job; `Client` adds the model as numpy arrays.

    The properties are as of the last answer of the servers.

    Attributes:
        model: The job's model as flat buffers.
        data: Batches of the job's loops.
        reduction: Requests of policy allreduce.
    """

    def __init__(self, connection: Connection, observes: bool, lanes: Lanes) -> None:
        self._connection = connection
        self.model = ModelExchange(connection, observes, lanes)
        self.data = BatchClient(connection, self.model)
        self.reduction = ReduceClient(connection, self.model)

    @property
    def job(self) -> str:
        """The identifier of the job that the servers run."""
        return self._connection.membership.job

    @property
    def training(self) -> str:
        """The name of the training when this worker joined; empty: it has none."""
        return self._connection.membership.training

    @property
    def worker(self) -> int:
        """This worker's number, new with every connection and `rejoin`; 0 for an observer."""
        return self._connection.membership.worker

    @property
    def policy(self) -> str:
        """The policy as of the last heartbeat, see `--policy`; empty for an observer."""
        return self._connection.membership.policy

    @property
    def workers(self) -> int:
        """Number of workers that train now, as of the last heartbeat.

        While the job waits for its workers: the larger of its members and `--min-workers`.
        """
        return self._connection.membership.workers

    @property
    def is_first(self) -> bool:
        """True on exactly one of the workers that train, as of the last heartbeat.

        While the job waits for its workers: True on the worker with rank 0.
        """
        return self._connection.membership.is_first

    @property
    def bad_gradients(self) -> str:
        """Handling of gradients with NaN or Inf: abort, skip or clip; empty for an observer."""
        return self._connection.bad_gradients

    @property
    def place(self) -> GroupPlace:
        """The place of this process among those of the worker: it is the only one."""
        return ALONE

    @property
    def loss_ticket(self) -> LossTicket:
        """With it, another process of the worker's group can report that the worker is lost."""
        connection, worker = self._connection, self.worker
        key = connection.transport.worker_key(worker).hex()
        return LossTicket(self.addresses[0], self.job, worker, key, connection.lease_seconds)

    @property
    def clock(self) -> Clock:
        """The source of all times of this client."""
        return self._connection.transport.clock

    @property
    def addresses(self) -> Sequence[str]:
        """Addresses of the servers, by shard."""
        return self._connection.transport.addresses

    @property
    def plan(self) -> PartitionPlan:
        """Partition of the model's bytes; InvalidRequestError before a model is registered."""
        return self.model.shards.plan

    @property
    def version(self) -> int:
        """Version of the weights that were pulled last, the smallest over the shards."""
        return self.model.version

    @property
    def groups_json(self) -> str:
        """The optimizer's parameter groups as they stood when the model was registered."""
        return self.model.groups_json

    @property
    def seed(self) -> int:
        """The job's seed once the model is registered, unsigned 64 bits.

        Before, it is what this worker proposes: the proposal of the first worker that registers
        becomes the job's seed.
        """
        return self._connection.seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._connection.seed = seed

    @property
    def draining(self) -> bool:
        """True if this worker was asked to leave: SIGTERM to ps-worker, ps-ctl drain, `drain`."""
        return self._connection.drain.asked

    def drain(self) -> None:
        """Ask this worker to leave, as SIGTERM to ps-worker does. Call it from any thread."""
        self._connection.drain.ask()

    @property
    def stopping(self) -> bool:
        """True if the job ends or this worker was asked to leave: finish the step, then close."""
        return self._connection.membership.stopping or self.draining

    def collective(
        self, number: int, call: CollectiveCall, first_open: ScriptPlace | int
    ) -> CollectiveResult:
        """Make the call of this number, from 1 on; see `Job.barrier`.

        first_open: As in `BatchClient.next_batches`.
        """
        connection, membership = self._connection, self._connection.membership
        what = f"{call.kind} (collective call {number})"
        retry = connection.new_retry(what)
        while True:
            wait_seconds = retry.next_wait_seconds()
            request = co.CollectiveRequest(
                job=membership.job,
                worker=membership.worker,
                number=number,
                kind=call.kind,
                names=call.values,
                values=call.values.values(),
                samples=call.samples,
                json=call.text,
                wait_ms=round(wait_seconds * 1000),
                **place_fields(first_open),
            )
            answer = connection.new_retry(what).ask(COLLECTIVE, request, wait_seconds)
            if answer.done:
                membership.require_version(answer.version)
                values = dict(zip(call.values, answer.values, strict=True))
                return CollectiveResult(values, answer.json, answer.version)
            if answer.weights_wanted:
                self.model.offer_weights()
            try:
                retry.handle_wait(answer.waiting_for)
            except WaitTimeoutError as error:
                raise WaitTimeoutError(
                    f"{error}. Try: the same calls on all workers, or a larger wait_timeout",
                    error.reason,
                ) from error

    def status(self) -> dict[str, Any]:
        """Ask for the job as `ps-ctl status --output json` shows it."""
        retry = self._connection.new_retry("asking for the status")
        answer = retry.ask(GET_STATUS, co.GetStatusRequest())
        found: dict[str, Any] = json.loads(answer.status_json)
        return found

    def report(self, **values: SupportsFloat) -> None:
        """Report values for the job's summary, metrics and logs."""
        numbers = {name: float(value) for name, value in values.items()}
        request = co.ReportMetricsRequest(job=self.job, worker=self.worker, metrics=numbers)
        self._connection.new_retry("reporting").ask(REPORT_METRICS, request)
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
        connection, membership = self._connection, self._connection.membership
        connection.reports.settle(final=True)
        if not (reports := connection.reports.unsent()):
            return
        request = co.ReportMetricsRequest(
            job=membership.job, worker=membership.worker, values=membership.wire_values(reports)
        )
        connection.new_retry("reporting").ask(REPORT_METRICS, request)
        connection.reports.confirm(reports)

    def show_progress(self, progress: StepProgress) -> None:
        """Set what the next heartbeat reports; a direct transport sends it at once."""
        connection, membership = self._connection, self._connection.membership
        connection.reports.settle()
        connection.touch()
        membership.progress = progress
        if connection.transport.direct:
            membership.send_heartbeat(
                connection.transport, connection.limits.call, connection.drain
            )

    def rejoin(self) -> None:
        """Join again as a new worker after a FencedError, with the registered model.

        What the old worker had not pushed is lost, and its leased batches went back. Pull before
        you compute.

        Raises:
            MismatchError: The servers run another job or model now.
            FencedError: The servers have lost the job's weights.
            QuarantinedError: Too many gradients of this worker were bad (--quarantine-after).
        """
        self.model.rejoin(REJOIN_REASON)

    def retire(self, reason: str = "") -> None:
        """Leave the rounds as `leave` does; pulls, reports and status work until `close`.

        reason: Why the worker leaves; empty if it is done.
        """
        self.model.retire(reason)

    def leave(self, reason: str = "") -> None:
        """Leave the job: no process waits for this worker any more. reason: as in `retire`."""
        self._connection.leave(reason)

    def close(self) -> None:
        """Leave the job as done, and free threads and connections. May be repeated."""
        self.model.abandon()
        self._connection.close()
