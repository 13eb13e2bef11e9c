"""Requests to calls on the engine, answers back. No decisions here."""

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import grpc

from pscommon.core.errors import FencedError, InvalidRequestError, MismatchError
from pscommon.core.log import PushKey, Staged
from pscommon.wire.codec import batches_from_proto
from pscommon.wire.frames import Filler, decode_request, encode_header
from pscommon.wire.status import answering
from psproto.v1 import parameter_server_pb2 as pb
from psserver.core.shard import Outcome
from psserver.engine import Engine
from psserver.identity import Identity

OUTCOMES = {"applied": pb.OUTCOME_APPLIED, "stale": pb.OUTCOME_STALE, "rejected": pb.OUTCOME_REJECTED}


class ParameterServer:
    """The data plane of one shard (proto/psproto/v1/parameter_server.proto)."""

    def __init__(self, engine: Engine, identity: Identity) -> None:
        self._engine = engine
        self._identity = identity

    def Describe(self, request: pb.DescribeRequest, context: grpc.ServicerContext) -> pb.DescribeResponse:
        identity = self._identity
        return pb.DescribeResponse(
            job=identity.job,
            shard=identity.shard,
            shards=identity.shards,
            addresses=identity.addresses,
            coordinator=identity.coordinator,
            version_text=version("paramserver"),
        )

    def Introduce(self, request: pb.IntroduceRequest, context: grpc.ServicerContext) -> pb.IntroduceResponse:
        with answering(context):
            self._identity.introduce(request.coordinator)
        return pb.IntroduceResponse()

    def Exchange(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        with answering(context):
            yield from self.exchange(frames, context.is_active)

    def exchange(self, frames: Iterator[bytes], alive: Any) -> Iterator[bytes]:
        """The answer's frames; alive() tells whether anybody still waits for them."""
        first = next(frames, None)
        header = decode_request(first) if first is not None else None
        if not isinstance(header, pb.PushPullHeader):
            raise InvalidRequestError("an Exchange starts with its header")
        if header.job != self._identity.job:
            mine = self._identity.job or "none yet"
            raise MismatchError(f"this server's job is {mine}, not {header.job}", "JOB_MISMATCH")
        pushing = header.initial or header.seq > 0
        key = PushKey(header.worker, header.seq) if pushing else None
        again = key is not None and header.has_data and self._receive(key, header, frames)
        outcome = self._engine.wait(key, header.min_version, header.wait_ms / 1000, alive)
        yield from self._answer(header, key, outcome, again)

    def _receive(self, key: PushKey, header: pb.PushPullHeader, frames: Iterator[bytes]) -> bool:
        """Take a push in. True: it had been decided before, its bytes were for nothing."""
        store = self._engine.wait_for_store(header.wait_ms / 1000)
        staging = store.staging(frozenset(header.absent), header.initial)
        try:
            _fill(staging.views, frames)
            if header.groups_json:
                staging.groups = self._engine.groups(header.groups_json)
            if header.samples < 1 and not header.initial:
                raise InvalidRequestError("a push stands for at least one sample")
        except BaseException:
            store.release(staging)
            raise
        batches = batches_from_proto(header.batches)
        return not self._engine.stage(Staged(key, max(1, header.samples), header.base, batches), staging)

    def _answer(
        self, header: pb.PushPullHeader, key: PushKey | None, outcome: Outcome | None, again: bool
    ) -> Iterator[bytes]:
        result = pb.ExchangeResult(outcome=pb.OUTCOME_NONE, version=self._engine.version)
        if outcome is not None:
            if outcome.reason == "FENCED":
                raise FencedError(f"worker {header.worker} is out of the job: {outcome.detail}")
            result.outcome = pb.OUTCOME_DUPLICATE if again else OUTCOMES[outcome.status]
            result.version, result.staleness = outcome.version, outcome.staleness
            result.reason, result.detail = outcome.reason, outcome.detail
            if key is not None:
                _, result.wait_seconds, result.apply_seconds = self._engine.timing(key)
        elif key is not None or not self._engine.begun or self._engine.version < header.min_version:
            self._engine.check_gathering()
            yield encode_header(
                pb.ExchangeResult(
                    outcome=pb.OUTCOME_PENDING, version=self._engine.version, waiting_for=self._engine.waiting_for()
                )
            )
            return
        data: list[bytes] = []
        if header.pull in (pb.PULL_STEP, pb.PULL_ALL):
            result.version, data, result.nbytes = self._engine.read(header.pull == pb.PULL_ALL)
        yield encode_header(result)
        yield from data
        self._engine.sent(result.nbytes)


def _fill(views: list[memoryview], frames: Iterator[bytes]) -> None:
    """A push's bytes, straight to where they are kept."""
    filler = Filler(views)
    for raw in frames:
        frame = decode_request(raw)
        if not isinstance(frame, memoryview):
            raise InvalidRequestError("a second header in one Exchange")
        filler.fill(frame)
    if not filler.complete:
        raise InvalidRequestError(f"the push ended {filler.missing} bytes early")
