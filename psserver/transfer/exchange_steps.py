"""The steps of an exchange that do not wait: checks of the header, staging, and the answer.

Both transports carry them out: gRPC in the thread of its call (servicer.py), streams in an event
loop (psserver/stream).
"""

from typing import NamedTuple

from pscommon.core.errors import InvalidRequestError, out_of_the_job
from pscommon.core.log_entries import PushKey, Staged
from pscommon.wire.messages import batches_from_proto
from psproto.v1 import parameter_server_pb2 as pb
from psserver.core.commands.request_checks import wait_seconds
from psserver.core.shard.state_machine import PushOutcome
from psserver.parameters.staging import Staging
from psserver.process.identity import ServerIdentity
from psserver.shard.engine import ShardEngine
from psserver.transfer.pull_sender import PullSender
from psserver.transfer.staging_allocator import StagingAllocator

OUTCOMES = {
    "applied": pb.OUTCOME_APPLIED,
    "stale": pb.OUTCOME_STALE,
    "rejected": pb.OUTCOME_REJECTED,
}


class ExchangeRequest(NamedTuple):
    """What a header asks for.

    Attributes:
        key: The push; None for a pull alone.
        wait_seconds: How long the answer may take.
    """

    key: PushKey | None
    wait_seconds: float


class ExchangeSteps:
    """The steps of one shard's exchanges.

    Attributes:
        allocator: Allocates memory for pushes.
        pulls: Answers pulls.
    """

    def __init__(self, engine: ShardEngine, identity: ServerIdentity) -> None:
        self._engine, self._identity = engine, identity
        self.pulls = PullSender(engine)
        self.allocator = StagingAllocator(engine)

    def begin(self, header: pb.PushPullHeader) -> ExchangeRequest:
        """Check a header.

        Raises MismatchError, UnreachableError or LayoutError if it is meant for another server.
        """
        self._identity.check_job(header.job)
        self._identity.check_term(header.term)
        self._engine.live.check_layout(header.shards)
        seconds = wait_seconds(header.wait_ms)
        self._engine.traffic.transfer.note_request(header.worker)
        is_push = header.initial or header.seq > 0
        return ExchangeRequest(PushKey(header.worker, header.seq) if is_push else None, seconds)

    def stage(self, key: PushKey, header: pb.PushPullHeader, staging: Staging) -> bool:
        """Stage a push that was checked. Return whether it was decided before.

        From here on the engine frees the staging, also after an error.
        """
        batches = batches_from_proto(header.batches)
        return not self._engine.stage_push(
            Staged(
                key,
                max(1, header.samples) if header.initial else header.samples,
                header.base,
                batches,
                optimizer="" if header.initial else header.optimizer,
            ),
            staging,
        )

    def check_push(self, header: pb.PushPullHeader, staging: Staging) -> None:
        """Check the fields of a push that depend on the model, and take its hyper-parameters."""
        if header.initial:
            return
        store = self._engine.live.require_store()
        if not header.samples:
            if header.batches or store.has_gradients(staging):
                raise InvalidRequestError("a push of no samples must have buffers only")
            return
        store.check_optimizer(staging, header.optimizer)
        if header.groups_json:
            staging.groups = store.parse_groups(header.groups_json, header.optimizer)

    def make_result(
        self,
        header: pb.PushPullHeader,
        key: PushKey | None,
        outcome: PushOutcome | None,
        is_duplicate: bool,
    ) -> pb.ExchangeResult:
        """Return the answer, and copy weights to shared memory if the header names any.

        `pulled` without shared memory: the weights of the shard follow.
        """
        live = self._engine.live
        result = pb.ExchangeResult(
            outcome=pb.OUTCOME_NONE, version=live.version, term=self._identity.term
        )
        if outcome is not None:
            if outcome.reason == "FENCED":
                raise out_of_the_job(header.worker, outcome.detail)
            result.outcome = pb.OUTCOME_DUPLICATE if is_duplicate else OUTCOMES[outcome.status]
            result.version, result.staleness = outcome.version, max(0, outcome.staleness)
            result.reason, result.detail = outcome.reason, outcome.detail
            if key is not None:
                _, result.wait_seconds, result.apply_seconds = self._engine.traffic.pushes.find(key)
        elif key is not None or not live.has_begun or live.version < header.min_version:
            self._engine.check_first_workers()
            return self.make_pending(self._engine.describe_wait())
        result.pulled = header.pull in (pb.PULL_STEP, pb.PULL_ALL)
        if result.pulled and header.memory:
            self.pulls.write_shared(header, result)
        return result

    def make_pending(self, waiting_for: str) -> pb.ExchangeResult:
        """Return the answer to a push that is not decided yet."""
        return pb.ExchangeResult(
            outcome=pb.OUTCOME_PENDING,
            version=self._engine.live.version,
            waiting_for=waiting_for,
            term=self._identity.term,
        )
