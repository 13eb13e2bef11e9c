"""Facts about the job that a client knows, or can ask for."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pscommon.core.script_place import PassName
from pscommon.wire.requests import GET_STATUS
from psproto.v1 import coordinator_pb2 as co
from psworker.connection.connection import Connection
from psworker.core.clock import Clock


class ClientFacts:
    """Facts about the job; the properties are as of the last answer of the servers."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

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
        """The policy as of the last heartbeat: sync, async or ssp; empty for an observer."""
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
    def clock(self) -> Clock:
        """The source of all times of this client."""
        return self._connection.transport.clock

    @property
    def addresses(self) -> Sequence[str]:
        """Addresses of the servers, by shard."""
        return self._connection.transport.addresses

    @property
    def open_loop(self) -> int:
        """Number of a loop: all earlier loops had ended when this worker joined."""
        return self._connection.membership.open_loop

    @property
    def update_counts(self) -> Mapping[str, int]:
        """Number of updates of each optimizer when the model was registered.

        Empty in a job with one optimizer.
        """
        return self._connection.membership.update_counts

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

    def status(self) -> dict[str, Any]:
        """Ask for the job as `ps-ctl status --output json` shows it."""
        request = co.GetStatusRequest()
        answer = self._connection.call("asking for the status", GET_STATUS, request)
        found: dict[str, Any] = json.loads(answer.status_json)
        return found

    def has_ended(self, loop: PassName) -> bool:
        """Return whether this pass had ended when this worker joined."""
        return self._connection.membership.has_ended(loop)

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
