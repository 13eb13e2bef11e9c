"""Client of the coordinator for administration, without membership in the job."""

import json
from collections.abc import Sequence
from typing import Any

from pscommon.core.errors import (
    AuthenticationError,
    FormatError,
    MismatchError,
    UnreachableError,
)
from pscommon.core.partition import PartitionPlan
from pscommon.wire.endpoint import Endpoint, open_channel
from pscommon.wire.messages import model_from_proto
from pscommon.wire.requests import (
    DRAIN,
    GET_STATUS,
    GET_TRACE,
    REGISTER,
    RESHARD,
    RESTORE_SNAPSHOT,
    SAVE_SNAPSHOT,
    SCALE_WORKERS,
    SET_POLICY,
    STOP_JOB,
    A,
    Q,
    Request,
    call,
)
from pscommon.wire.tls_probe import cause_of
from psproto.v1 import coordinator_pb2 as pb
from psworker.connection.discovery import describe
from psworker.core.server_search import ServerDescription


class CoordinatorClient:
    """Connection to the coordinator on shard 0; works in every state of the job."""

    def __init__(self, addresses: Sequence[str], timeout: float) -> None:
        """Find shard 0 through any server of the job; `timeout` is the deadline of each call.

        Raises UnreachableError if no server answers, or none knows the address of shard 0.
        """
        self._timeout = timeout
        self.address, self.described = _find_coordinator(addresses, timeout)
        self._channel = open_channel(Endpoint(self.address))

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self._call(GET_STATUS, pb.GetStatusRequest()).status_json))

    def plan(self) -> PartitionPlan:
        """Return the placement of all tensors.

        Raises:
            UnreachableError: no worker has registered the model yet (NOT_READY).
        """
        request = pb.RegisterRequest(job=self.described.job, observe=True)
        answer = self._call(REGISTER, request)
        if answer.state != pb.RegisterResponse.STATE_READY:
            raise UnreachableError(
                f"the model is not registered yet: the job waits for {answer.waiting_for}",
                "NOT_READY",
            )
        return PartitionPlan(model_from_proto(answer.model), self.described.shards)

    def spans(self, after: int | None) -> pb.GetTraceResponse:
        """Return the batches of spans after the last answer; the processes record for 3 s more.

        Args:
            after: `next` of the last answer, None before the first one.

        Raises:
            FormatError: The servers' release records no spans.
        """
        try:
            return self._call(GET_TRACE, pb.GetTraceRequest(after=after))
        except MismatchError as error:
            raise FormatError(
                f"shard 0 at {self.address} records no spans: its release is older. Try: install "
                f"this release on the servers",
                "FORMAT",
            ) from error

    def save(self, wait: float) -> tuple[int, str]:
        """Take a snapshot and return its version and folder; `wait` is in seconds."""
        request = pb.SaveSnapshotRequest(wait_ms=round(wait * 1000))
        answer = self._call(SAVE_SNAPSHOT, request, wait)
        return answer.version, answer.path

    def restore(self, version: int, wait: float) -> None:
        """Roll all shards back to a snapshot; `wait` is in seconds."""
        request = pb.RestoreSnapshotRequest(version=version, wait_ms=round(wait * 1000))
        self._call(RESTORE_SNAPSHOT, request, wait)

    def drain(self, worker: int) -> None:
        """Ask a worker to leave at its next step boundary."""
        self._call(DRAIN, pb.DrainRequest(worker=worker))

    def scale_workers(self, workers: int) -> None:
        """Set the number of workers that the job wants."""
        self._call(SCALE_WORKERS, pb.ScaleWorkersRequest(workers=workers))

    def set_policy(self, name: str, staleness: int | None, max_staleness: int | None) -> None:
        """Set the policy from the next update on."""
        request = pb.SetPolicyRequest(policy=name, staleness=staleness, max_staleness=max_staleness)
        self._call(SET_POLICY, request)

    def reshard(self, shards: int, wait: float) -> tuple[float, int]:
        """Change the number of shards; `wait` is in seconds.

        Returns:
            Seconds for which no push was applied, and bytes moved between servers.
        """
        request = pb.ReshardRequest(shards=shards, wait_ms=round(wait * 1000))
        answer = self._call(RESHARD, request, wait)
        return answer.seconds, answer.nbytes

    def stop(self, reason: str) -> None:
        """End the job; every server exits after a last snapshot."""
        self._call(STOP_JOB, pb.StopJobRequest(reason=reason))

    def _call(self, row: Request[Q, A], message: Q, wait: float = 0.0) -> A:
        """Return the answer; the server may wait for this many seconds."""
        who = f"shard 0 at {self.address}"
        return call(self._channel, row, message, wait + self._timeout, who)

    def __enter__(self) -> "CoordinatorClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()


def _find_coordinator(addresses: Sequence[str], timeout: float) -> tuple[str, ServerDescription]:
    """Return address and description of shard 0; servers may refer to further addresses."""
    problems: list[str] = []
    candidates = list(addresses)
    for address in candidates:
        try:
            described = describe(address, timeout)
        except UnreachableError as error:
            refusal = cause_of(error, address)
            if isinstance(refusal, AuthenticationError):
                raise refusal from error
            problems.append(str(error))
            continue
        if described.shard == 0:
            return address, described
        hint = described.hints().get(0, "")
        if hint not in ("", *candidates):
            candidates.append(hint)
        if not hint:
            problems.append(
                f"{address} is shard {described.shard} and does not know the address of shard 0 yet"
            )
    raise UnreachableError("; ".join(problems), "UNREACHABLE")
