"""The servers of a job, asked by somebody who only looks: any one address leads to shard 0,
which knows everything.
"""

import json
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from pscommon.core.errors import UnreachableError
from pscommon.core.partition import PartitionPlan
from pscommon.wire.channel import open_channel
from pscommon.wire.messages import model_from_proto
from pscommon.wire.status import translated
from psproto.v1 import coordinator_pb2 as pb
from psproto.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from psworker.connection.discovery import describe
from psworker.core.server_search import ServerDescription


class CoordinatorClient:
    """A connection to shard 0. Takes no part in the job, so works in every state of it.

    timeout: seconds that each call may take. Raises UnreachableError where nobody answers in
    time, and what the servers answer.
    """

    def __init__(self, addresses: Sequence[str], timeout: float) -> None:
        self._timeout = timeout
        self.address, self.described = _find_coordinator(addresses, timeout)
        self._channel = open_channel(self.address)
        self._stub = CoordinatorServiceStub(self._channel)
        self._who = f"shard 0 at {self.address}"

    def status(self) -> dict[str, Any]:
        """Everything that the coordinator tells (its keys are in the README)."""
        with translated(self._who):
            answer = self._stub.GetStatus(pb.GetStatusRequest(), timeout=self._timeout)
        document = json.loads(answer.status_json)
        return dict(document)

    def plan(self) -> PartitionPlan:
        """Where every tensor lies. UnreachableError (NOT_READY) before the first worker has
        brought the model.
        """
        request = pb.RegisterRequest(job=self.described.job, observe=True)
        with translated(self._who):
            answer = self._stub.Register(request, timeout=self._timeout)
        if answer.state != pb.RegisterResponse.STATE_READY:
            raise UnreachableError(
                f"there is no model yet: the job waits for {answer.waiting_for}", "NOT_READY"
            )
        return PartitionPlan(model_from_proto(answer.model), self.described.shards)

    def save(self, wait: float) -> tuple[int, str]:
        """Takes a snapshot and waits up to `wait` seconds until it is written; its version and
        folder.
        """
        request = pb.SaveSnapshotRequest(wait_ms=round(wait * 1000))
        with translated(self._who):
            answer = self._stub.SaveSnapshot(request, timeout=wait + self._timeout)
        return answer.version, answer.path

    def restore(self, version: int, wait: float) -> None:
        """All shards go back to this snapshot; waits up to `wait` seconds until they have."""
        request = pb.RestoreSnapshotRequest(version=version, wait_ms=round(wait * 1000))
        with translated(self._who):
            self._stub.RestoreSnapshot(request, timeout=wait + self._timeout)

    def drain(self, worker: int) -> None:
        """Asks a worker to leave at its next step boundary."""
        with translated(self._who):
            self._stub.Drain(pb.DrainRequest(worker=worker), timeout=self._timeout)

    def set_policy(self, name: str, staleness: int | None, max_staleness: int | None) -> None:
        """Another policy from the next update on."""
        request = pb.SetPolicyRequest(policy=name, staleness=staleness, max_staleness=max_staleness)
        with translated(self._who):
            self._stub.SetPolicy(request, timeout=self._timeout)

    def reshard(self, shards: int, wait: float) -> tuple[float, int]:
        """The model moves to so many servers; how long no push counted, and the bytes that went
        between servers.
        """
        request = pb.ReshardRequest(shards=shards, wait_ms=round(wait * 1000))
        with translated(self._who):
            answer = self._stub.Reshard(request, timeout=wait + self._timeout)
        return answer.seconds, answer.nbytes

    def stop(self, reason: str) -> None:
        """Ends the job; every server exits once a last snapshot is written."""
        with translated(self._who):
            self._stub.StopJob(pb.StopJobRequest(reason=reason), timeout=self._timeout)

    def __enter__(self) -> "CoordinatorClient":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._channel.close()


def _find_coordinator(addresses: Sequence[str], timeout: float) -> tuple[str, ServerDescription]:
    """Where shard 0 is, by its own word: at one of these addresses, or where one of these
    servers says that it is.
    """
    problems: list[str] = []
    places = list(addresses)
    for address in places:
        try:
            described = describe(address, timeout)
        except UnreachableError as error:
            problems.append(str(error))
            continue
        if described.shard == 0:
            return address, described
        hint = described.hints().get(0, "")
        if hint not in ("", *places):
            places.append(hint)
        if not hint:
            problems.append(
                f"{address} is shard {described.shard} and does not know yet where shard 0 is"
            )
    raise UnreachableError("; ".join(problems), "UNREACHABLE")
