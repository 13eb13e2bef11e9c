"""A worker's requests under policy allreduce, beside its pushes: reduce rounds and downloads."""

import json
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager

import grpc

from pscommon.core.errors import WaitTimeoutError
from pscommon.settings.values import host_and_port
from pscommon.wire.endpoint import Endpoint, open_channel
from pscommon.wire.requests import READ_SHARD, REDUCE, Stub
from pscommon.wire.status import translated
from psproto.v1 import coordinator_pb2 as co
from psproto.v1 import shard_pb2
from psworker.connection.connection import Connection
from psworker.core.results import ReduceAnswer, StoredState
from psworker.exchange.model_exchange import ModelExchange

READ_SECONDS = 30.0
SLOWEST_BYTES_PER_SECOND = 10e6


class ReduceClient:
    """Asks for reduce rounds, and says what has become of them. One thread uses it.

    A new membership numbers its requests from 1.
    """

    def __init__(self, connection: Connection, exchange: ModelExchange) -> None:
        self._connection, self._exchange = connection, exchange
        self._asked: tuple[int, int] = 0, 0  # worker, and number of its newest request

    @property
    def own_host(self) -> str:
        """The address of this host by which other workers reach it, as the servers do."""
        address = self._connection.transport.addresses[0]
        host, port = host_and_port(address)
        family, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])

    def ask(
        self,
        version: int | None,
        samples: int,
        address: str,
        groups_json: str = "",
        is_partial: bool = False,
        completed: int = 0,
    ) -> ReduceAnswer:
        """Return the next round of this worker. The arguments are those of `ReduceRequest`."""
        connection = self._connection
        membership = connection.membership
        worker, number = self._asked
        number = number + 1 if worker == membership.worker else 1
        self._asked = membership.worker, number
        retry = connection.new_retry(f"reduce request {number}")
        request = co.ReduceRequest(
            job=membership.job,
            worker=membership.worker,
            number=number,
            version=version,
            samples=samples,
            address=address,
            groups_json=groups_json,
            is_partial=is_partial,
            completed=completed,
        )
        while True:
            wait_seconds = retry.next_wait_seconds()
            request.wait_ms = round(wait_seconds * 1000)
            asking = connection.new_retry(f"reduce request {number}")
            answer = asking.ask(REDUCE, request, wait_seconds)
            if answer.kind:
                return ReduceAnswer(
                    answer.kind,
                    answer.round,
                    answer.group,
                    tuple(answer.workers),
                    tuple(answer.samples),
                    answer.source,
                    answer.address,
                    answer.groups_json,
                    answer.is_partial,
                )
            try:
                retry.handle_wait(answer.waiting_for)
            except WaitTimeoutError as error:
                raise WaitTimeoutError(
                    f"{error}. Try: a larger wait_timeout, or shorter work between steps",
                    error.reason,
                ) from error

    def is_open(self, number: int) -> bool:
        """Return whether a reduce round is open."""
        return self._look_at(number).open

    def uploaded_version(self) -> int:
        """Return the version of the weights that the servers have."""
        return self._look_at().uploaded

    def _look_at(self, number: int = 1) -> co.ReduceResponse:
        """Ask whether a round is open; with any number, for the rest of the answer."""
        connection = self._connection
        membership = connection.membership
        request = co.ReduceRequest(job=membership.job, worker=membership.worker, within=number)
        return connection.new_retry(f"reduce round {number}").ask(REDUCE, request)

    def generation(self) -> int:
        """Return the number of this start of the servers."""
        return self._look_at().generation

    def set_version(self, version: int) -> None:
        """Note the version of the weights that this worker has, which scripts see."""
        self._exchange.shards.version = version

    def finishing(self) -> AbstractContextManager[None]:
        """Return a context in which the deadline of a worker that leaves ends no request."""
        return self._connection.drain.finishing()

    @property
    def worker(self) -> int:
        return self._connection.membership.worker

    def download(self, weights: memoryview) -> StoredState:
        """Read optimizer state from the servers, and weights into memory for the flat buffer.

        All shards have one version of them.
        """
        connection = self._connection
        retry = connection.new_retry("reading weights and optimizer state")
        while True:
            found = StoredState(0)
            versions = set[int]()
            for address in connection.transport.addresses:
                with open_channel(Endpoint(address), tensors=True) as channel:
                    versions |= _ShardReader(channel, address, connection.membership.job).read(
                        found, weights
                    )
            if len(versions) == 1:
                found.version = versions.pop()
                return found
            retry.handle_wait("servers that take an upload")


class _ShardReader:
    """Reads one shard's part."""

    def __init__(self, channel: grpc.Channel, address: str, job: str) -> None:
        self._stub, self._address, self._job = Stub(channel, READ_SHARD), address, job

    def read(self, found: StoredState, weights: memoryview) -> set[int]:
        """Add this shard's part; return the versions that it had before and after."""
        before = self._describe()
        found.groups_json = before.groups_json
        found.steps |= before.steps
        scalars = json.loads(before.scalars_json) if before.scalars_json else {}
        for name, values in scalars.items():
            found.scalars.setdefault(name, {}).update(values)
        for kind in before.kinds:
            target = weights
            if kind != "weight":
                target = memoryview(found.states.setdefault(kind, bytearray(weights.nbytes)))
            for answer in self._ask(kind, weights.nbytes):
                target[answer.start : answer.start + len(answer.data)] = answer.data
        return {before.version, self._describe().version}

    def _describe(self) -> shard_pb2.Holding:
        return next(iter(self._ask("", 0))).holding

    def _ask(self, kind: str, stop: int) -> Iterator[shard_pb2.ReadShardResponse]:
        request = shard_pb2.ReadShardRequest(job=self._job, kind=kind, stop=stop, current=True)
        seconds = READ_SECONDS + stop / SLOWEST_BYTES_PER_SECOND
        with translated(f"the server at {self._address} (ReadShard)"):
            yield from self._stub(request, timeout=seconds)
