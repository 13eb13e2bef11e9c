"""Requests to calls on the engine, answers back. No decisions here."""

from collections.abc import Callable, Iterator

import grpc

from pscommon.core.errors import InFlightError, InvalidRequestError, out_of_the_job
from pscommon.core.formats import spoken_format
from pscommon.core.log_entries import PushKey, Staged
from pscommon.core.partition import piece_nbytes
from pscommon.system.packages import installed
from pscommon.wire.frames import Frame, decode_request, encode_header
from pscommon.wire.messages import batches_from_proto
from pscommon.wire.status import answering
from psproto.v1 import parameter_server_pb2 as pb
from psserver.core.commands.request_checks import wait_seconds
from psserver.core.shard.state_machine import PushOutcome
from psserver.process.identity import ServerIdentity
from psserver.shard.engine import ShardEngine
from psserver.transfer.pull_sender import PullSender
from psserver.transfer.push_receiver import receive, receive_open
from psserver.transfer.staging_allocator import StagingAllocator

Alive = Callable[[], bool]

OUTCOMES = {
    "applied": pb.OUTCOME_APPLIED,
    "stale": pb.OUTCOME_STALE,
    "rejected": pb.OUTCOME_REJECTED,
}


class DataPlaneServicer:
    """The data plane of one shard (proto/psproto/v1/parameter_server.proto)."""

    def __init__(self, engine: ShardEngine, identity: ServerIdentity) -> None:
        self._engine = engine
        self._identity = identity
        self._allocator = StagingAllocator(engine)
        self._pulls = PullSender(engine)

    def Describe(
        self, request: pb.DescribeRequest, context: grpc.ServicerContext
    ) -> pb.DescribeResponse:
        identity = self._identity
        return pb.DescribeResponse(
            job=identity.job,
            shard=identity.shard,
            shards=identity.shards,
            addresses=identity.addresses,
            coordinator=identity.coordinator,
            version_text=installed("paramserver"),
            term=identity.term,
            layout=identity.layout,
            format=spoken_format(),
        )

    def Introduce(
        self, request: pb.IntroduceRequest, context: grpc.ServicerContext
    ) -> pb.IntroduceResponse:
        with answering(context):
            self._identity.introduce(request.coordinator, request.job)
        return pb.IntroduceResponse()

    def Exchange(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        with answering(context):
            yield from self.exchange(frames, context.is_active)

    def exchange(self, frames: Iterator[bytes], alive: Alive) -> Iterator[bytes]:
        """The answer's frames; alive() tells whether anybody still waits for them."""
        first = next(frames, None)
        if first is None:
            raise InvalidRequestError("an Exchange starts with its header")
        header, result = self._decide(first, frames, alive)
        if not result.pulled or header.memory:
            yield encode_header(result)
            return
        try:
            with self._pulls.reading(header, result, alive) as reading:
                yield encode_header(result)
                # an open push is one of a worker that computes on with what has come
                data = (
                    reading.frames(piece_nbytes(reading.nbytes))
                    if header.open
                    else reading.frames()
                )
                yield from self._engine.traffic.watched(header.worker, data)
        except InFlightError as full:
            yield encode_header(self._pending(str(full)))

    def ExchangeOnce(self, request: bytes, context: grpc.ServicerContext | None) -> bytes:
        with answering(context):
            alive = context.is_active if context is not None else _always
            header, result = self._decide(request, iter(()), alive)
            if not result.pulled or header.memory:
                return encode_header(result)
            return encode_header(result, memoryview(self._pulls.whole(header, result)))

    def AttachMemory(
        self, request: pb.AttachMemoryRequest, context: grpc.ServicerContext
    ) -> pb.AttachMemoryResponse:
        with answering(context):
            self._identity.check_job(request.job)
            reason = self._engine.memories.attach(request)
        return pb.AttachMemoryResponse(attached=not reason, reason=reason)

    def _decide(
        self, first: bytes, frames: Iterator[bytes], alive: Alive
    ) -> tuple[pb.PushPullHeader, pb.ExchangeResult]:
        """Takes the push in, waits until it is decided, and says how; weights are put into
        shared memory, if any.
        """
        opening = decode_request(first)
        header = opening.header
        if header is None:
            raise InvalidRequestError("an Exchange starts with its header")
        self._identity.check_job(header.job)
        self._identity.check_term(header.term)
        self._engine.check_layout(header.shards)
        seconds = wait_seconds(header.wait_ms)
        self._engine.traffic.asked(header.worker)
        pushing = header.initial or header.seq > 0
        key = PushKey(header.worker, header.seq) if pushing else None
        again = (
            key is not None
            and header.has_data
            and self._receive(key, header, opening, frames, alive)
        )
        outcome = self._engine.wait(key, header.min_version, seconds, alive)
        return header, self._answer(header, key, outcome, again)

    def _receive(
        self,
        key: PushKey,
        header: pb.PushPullHeader,
        first: Frame[pb.PushPullHeader],
        frames: Iterator[bytes],
        alive: Alive,
    ) -> bool:
        """Take a push in. True: it had been decided before, its bytes were for nothing."""
        staging = self._allocator.take(header, alive)
        frames = self._engine.traffic.watched(header.worker, frames)
        try:
            if header.open:
                header.MergeFrom(receive_open(staging, first, frames))
            elif not header.memory:
                receive(staging, first.data, frames)
            if header.groups_json:
                staging.groups = self._engine.groups(header.groups_json)
            if header.samples < 1 and not header.initial:
                raise InvalidRequestError("a push stands for at least one sample")
        except BaseException:
            self._engine.release(staging)
            raise
        batches = batches_from_proto(header.batches)
        return not self._engine.stage(
            Staged(key, max(1, header.samples), header.base, batches), staging
        )

    def _answer(
        self,
        header: pb.PushPullHeader,
        key: PushKey | None,
        outcome: PushOutcome | None,
        again: bool,
    ) -> pb.ExchangeResult:
        result = pb.ExchangeResult(
            outcome=pb.OUTCOME_NONE, version=self._engine.version, term=self._identity.term
        )
        if outcome is not None:
            if outcome.reason == "FENCED":
                raise out_of_the_job(header.worker, outcome.detail)
            result.outcome = pb.OUTCOME_DUPLICATE if again else OUTCOMES[outcome.status]
            result.version, result.staleness = outcome.version, max(0, outcome.staleness)
            result.reason, result.detail = outcome.reason, outcome.detail
            if key is not None:
                _, result.wait_seconds, result.apply_seconds = self._engine.timings.of(key)
        elif key is not None or not self._engine.begun or self._engine.version < header.min_version:
            self._engine.check_gathering()
            return self._pending(self._engine.waiting_for())
        result.pulled = header.pull in (pb.PULL_STEP, pb.PULL_ALL)
        if result.pulled and header.memory:
            self._pulls.into_memory(header, result)
        return result

    def _pending(self, waiting_for: str) -> pb.ExchangeResult:
        return pb.ExchangeResult(
            outcome=pb.OUTCOME_PENDING,
            version=self._engine.version,
            waiting_for=waiting_for,
            term=self._identity.term,
        )


def _always() -> bool:
    return True
