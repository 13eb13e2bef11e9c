"""A worker's requests under policy allreduce: reduce rounds, pushes without bytes, uploads."""

import json
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import grpc

from pscommon.core.log_entries import WEIGHT, BatchKey
from pscommon.settings.values import host_and_port
from pscommon.wire.endpoint import Endpoint, open_channel
from pscommon.wire.requests import READ_SHARD, REDUCE, Stub
from pscommon.wire.status import translated
from psproto.v1 import coordinator_pb2 as co
from psproto.v1 import shard_pb2
from psworker.core.results import PushResult, ReduceAnswer
from psworker.exchange.model_exchange import ModelExchange

READ_SECONDS = 30.0
SLOWEST_BYTES_PER_SECOND = 10e6


@dataclass
class StoredState:
    """Weights and optimizer state of the servers.

    Attributes:
        version: Their version.
        states: The bytes of each optimizer state, in place of the whole flat buffer.
        groups_json: Hyper-parameters of the groups.
        steps: Steps of each tensor.
        scalars: State with one number per tensor, by name and index of the tensor.
    """

    version: int
    states: dict[str, bytearray] = field(default_factory=dict)
    groups_json: str = ""
    steps: dict[int, int] = field(default_factory=dict)
    scalars: dict[str, dict[str, float]] = field(default_factory=dict)


class ReduceClient:
    """Asks for reduce rounds, and says what has become of them. One thread uses it.

    A new membership numbers its requests from 1.
    """

    def __init__(self, exchange: ModelExchange) -> None:
        self._exchange = exchange
        self._asked: tuple[int, int] = 0, 0  # worker, and number of its newest request

    @property
    def own_host(self) -> str:
        """The address of this host by which other workers reach it, as the servers do."""
        address = self._exchange.shards.connection.transport.addresses[0]
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
    ) -> ReduceAnswer:
        """Return the next round of this worker. The arguments are those of `ReduceRequest`."""
        connection = self._exchange.shards.connection
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
            retry.handle_wait(answer.waiting_for)

    def look_at(self, number: int) -> tuple[bool, int]:
        """Return whether a round is open, and the version of the weights that the servers have."""
        connection = self._exchange.shards.connection
        membership = connection.membership
        request = co.ReduceRequest(job=membership.job, worker=membership.worker, within=number)
        answer = connection.new_retry(f"reduce round {number}").ask(REDUCE, request)
        return answer.open, answer.uploaded

    def set_version(self, version: int) -> None:
        """Note the version of the weights that this worker has, which scripts see."""
        self._exchange.shards.version = version

    @property
    def worker(self) -> int:
        return self._exchange.shards.connection.membership.worker

    def push(
        self,
        number: int,
        samples: int,
        base: int,
        batches: Sequence[BatchKey],
        groups_json: str,
    ) -> PushResult:
        """Send the push of a round, without bytes, and wait for its outcome."""
        gradients, _ = self._exchange.flat_buffers()
        return self._exchange.exchange(
            gradients=gradients,
            weights=None,
            samples=samples,
            batches=batches,
            groups_json=groups_json,
            base=base,
            reduce_round=number,
        )

    def upload(
        self, kind: str, memory: memoryview, version: int, groups_json: str, state_json: str
    ) -> bool:
        """Send weights or an optimizer state of the newest version to the servers.

        Return False if they have a newer version.
        """
        result = self._exchange.exchange(
            gradients=memory,
            weights=None,
            samples=0,
            groups_json=groups_json,
            base=version,
            upload=kind,
            state_json=state_json,
        )
        return result.status in ("applied", "duplicate")

    def download(self, weights: memoryview) -> StoredState:
        """Read weights and optimizer state from the servers, of one upload on all of them.

        weights: Memory for the whole flat buffer.
        """
        connection = self._exchange.shards.connection
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
            if kind != WEIGHT:
                target = memoryview(found.states.setdefault(kind, bytearray(weights.nbytes)))
            for answer in self._ask(kind, weights.nbytes):
                target[answer.start : answer.start + len(answer.data)] = answer.data
        return {before.uploaded, self._describe().uploaded}

    def _describe(self) -> shard_pb2.Holding:
        return next(iter(self._ask("", 0))).holding

    def _ask(self, kind: str, stop: int) -> Iterator[shard_pb2.ReadShardResponse]:
        request = shard_pb2.ReadShardRequest(job=self._job, kind=kind, stop=stop, current=True)
        seconds = READ_SECONDS + stop / SLOWEST_BYTES_PER_SECOND
        with translated(f"the server at {self._address} (ReadShard)"):
            yield from self._stub(request, timeout=seconds)
