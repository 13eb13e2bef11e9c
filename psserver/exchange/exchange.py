"""One exchange: receive a push, wait until it is decided, send weights.

Theory of operation. `Exchange.run` has all steps and all decisions, for every transport. Its `io`
moves bytes, and waits. Over a stream it suspends; over gRPC it blocks the thread of the call, and
only `send` suspends: the generator of the call then yields the frame. Through shared memory the
bytes of a push are there already, and those of weights are copied there: no `io` moves them.

A push is filled in two ways: in the order of its bytes, or, while it is open, at offsets.
"""

import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Protocol

from pscommon.core.errors import InFlightError, InvalidRequestError, out_of_the_job
from pscommon.core.log_entries import PushKey, Staged
from pscommon.tracing.recorder import server_spans
from pscommon.wire.messages import batches_from_proto
from pscommon.wire.push import parts_from_proto
from pscommon.wire.ranges import check_ranges
from pscommon.wire.stream_format import EAGER_BYTES
from psproto.v1 import parameter_server_pb2 as pb
from psserver.core.shard.state_machine import PushOutcome
from psserver.exchange.push_receiver import OpenPushReceiver
from psserver.parameters.staging import Staging, check_upload
from psserver.parameters.store import ParameterStore
from psserver.parameters.weight_reads import WeightRead
from psserver.process.identity import ServerIdentity
from psserver.shard.engine import ShardEngine
from psserver.waiting import Waiter, until

OUTCOMES = {
    "applied": pb.OUTCOME_APPLIED,
    "stale": pb.OUTCOME_STALE,
    "rejected": pb.OUTCOME_REJECTED,
}


Weights = WeightRead | bytes | None
Moved = Callable[[], None]


class ExchangeIO(Waiter, Protocol):
    """What an exchange needs of its connection."""

    async def receive(self, views: Sequence[memoryview], filled: Callable[[int], None]) -> None:
        """Fill the views with the data of the push.

        filled: Called with the number of bytes so far, after each piece.

        Raises:
            InvalidRequestError: The push has more or fewer bytes.
        """

    async def receive_piece(self, receiver: OpenPushReceiver) -> pb.PushPullHeader | None:
        """Give the next piece of an open push to the receiver; return the header that closes it."""
        ...

    async def discard(self) -> None:
        """Drop the data of the push, as far as the worker sends it without waiting."""

    async def send(self, result: pb.ExchangeResult, weights: Weights, moved: Moved) -> None:
        """Send the answer, and the weights after it.

        weights: A read to take the bytes from, or all bytes of a small pull; None: no pull.
        moved: Called after each piece of a read.
        """


class Exchange:
    """One exchange of a worker with one shard.

    engine: The shard.
    header: Header of the request.
    """

    def __init__(
        self, engine: ShardEngine, identity: ServerIdentity, header: pb.PushPullHeader
    ) -> None:
        self._engine, self._identity, self._header = engine, identity, header
        self._note_alive = partial(engine.traffic.statistics.note_request, header.worker)

    async def run(self, io: ExchangeIO) -> None:
        """Carry out the exchange and send the answer.

        Raises:
            PSError: The error to answer instead. What was staged for the push is free again.
        """
        header, engine = self._header, self._engine
        self._identity.check_job(header.job)
        self._identity.check_term(header.term)
        engine.live.check_shard_count(header.shards)
        seconds = header.wait_ms / 1000
        self._note_alive()
        is_push = header.initial or header.seq > 0
        key = PushKey(header.worker, header.seq) if is_push else None
        is_repeated = False
        if key is not None and header.has_data:
            is_decided = engine.find_repeat(key)
            if is_decided is None:
                began = server_spans.now()
                staging = await self._receive_push(io, seconds)
                self._record_span("receive", began)
                # from here on the engine frees the staging, also after an error
                stage = partial(engine.stage_push, self._make_staged(key), staging)
                is_repeated = not await io.do(stage)
            else:
                await io.discard()
                is_repeated = is_decided
        outcome = await until(
            partial(engine.find_outcome, key, header.min_version),
            partial(engine.watch_outcome, key),
            seconds,
            io,
        )
        result = await io.do(partial(self._make_result, key, outcome, is_repeated))
        if result.pulled and not header.memory:
            await self._send_weights(io, result, seconds)
        else:
            await self._send(io, result, None)

    # ---- the push --------------------------------------------------------------------------------

    async def _receive_push(self, io: ExchangeIO, seconds: float) -> Staging:
        """Receive a push, and check what depends on the model."""
        header = self._header
        staging = await self._allocate(io, seconds)
        try:
            if header.open:
                await self._receive_open(io, staging)
            elif not header.memory:
                await io.receive(staging.views, partial(self._note_filled, staging))
            self._check_push(staging)
        except BaseException:
            self._engine.release(staging)
            raise
        return staging

    def _make_staged(self, key: PushKey) -> Staged:
        """Return what the header says of the push."""
        header = self._header
        return Staged(
            key,
            max(1, header.samples) if header.initial else header.samples,
            header.base,
            batches_from_proto(header.batches),
            optimizer="" if header.initial else header.optimizer,
            reduce_round=header.reduce_round,
            upload=header.upload,
        )

    async def _allocate(self, io: ExchangeIO, seconds: float) -> Staging:
        """Return memory for the push, once the model is known and the budget has room."""
        header, live, traffic = self._header, self._engine.live, self._engine.traffic
        parts = parts_from_proto(header.parts)
        await until(
            lambda: live.store or live.stop_reason or None,
            partial(live.changes.watch, None),
            seconds,
            io,
        )
        store = live.require_store(header.shards)
        if header.reduce_round:
            return store.stage_nothing()
        has_all = header.initial or header.upload
        if header.memory:
            buffers = traffic.shared_buffers.find(header)
            return store.stage_worker_buffer(buffers.gradients, header.absent, has_all, parts)
        if not header.upload:  # it never comes through shared memory
            traffic.shared_buffers.check_network_allowed()
        nbytes = store.nbytes if has_all else store.step_nbytes
        nbytes += sum(span.nbytes for part in parts if part.state for span in part.ranges)
        claim = await traffic.budget.take(header.worker, nbytes, seconds, io, is_push=True)
        try:
            staging = store.allocate_staging(header.absent, has_all, parts)
        except BaseException:
            traffic.budget.release(claim)
            raise
        staging.claim = claim
        return staging

    async def _receive_open(self, io: ExchangeIO, staging: Staging) -> None:
        """Receive the pieces of a push that begins before it is complete, and its end."""
        receiver, closing = OpenPushReceiver(staging), None
        while closing is None:
            closing = await io.receive_piece(receiver)
            self._note_alive()
        if closing.parts:
            raise InvalidRequestError("the parts of a push are named before its data")
        if closing.worker not in (0, self._header.worker):
            raise InvalidRequestError("a push begins and ends with the same worker")
        receiver.close(closing.absent)
        self._header.MergeFrom(closing)
        check_ranges(self._header)  # its lists are longer now

    def _note_filled(self, staging: Staging, nbytes: int) -> None:
        staging.mark_filled(nbytes)
        self._note_alive()

    def _check_push(self, staging: Staging) -> None:
        """Check the fields of a push that depend on the model, and take its hyper-parameters."""
        header = self._header
        if header.initial:
            return
        store = self._engine.live.require_store()
        if not (header.samples or header.upload):
            if header.batches or store.has_gradients(staging):
                raise InvalidRequestError("a push of no samples must have buffers only")
            return
        if not (header.upload or header.reduce_round):
            store.check_optimizer(staging, header.optimizer)
        if header.groups_json:
            staging.groups = store.parse_groups(header.groups_json, header.optimizer)
        if header.upload:
            settings, groups = store.settings(header.optimizer), staging.groups
            used = groups.values if groups is not None else settings.groups
            check_upload(settings, used, staging.states, header.state_json)
            staging.state_json = header.state_json

    # ---- the answer ------------------------------------------------------------------------------

    def _make_result(
        self, key: PushKey | None, outcome: PushOutcome | None, is_repeated: bool
    ) -> pb.ExchangeResult:
        """Return the answer, and copy weights to shared memory if the header names any.

        `pulled` without shared memory: the weights of the shard follow.
        """
        header, engine = self._header, self._engine
        if outcome is None:
            return self._pending(engine.coordinator.describe_wait())
        if outcome.reason == "FENCED":
            raise out_of_the_job(header.worker, outcome.detail)
        result = pb.ExchangeResult(
            outcome=pb.OUTCOME_NONE, version=outcome.version, term=self._identity.term
        )
        if key is not None:
            result.outcome = pb.OUTCOME_DUPLICATE if is_repeated else OUTCOMES[outcome.status]
            result.staleness = max(0, outcome.staleness)
            result.reason, result.detail = outcome.reason, outcome.detail
            _, result.wait_seconds, result.apply_seconds = engine.traffic.statistics.find(key)
        result.pulled = header.pull in (pb.PULL_STEP, pb.PULL_ALL)
        if result.pulled and header.memory:
            _write_shared(engine, header, result)
        return result

    def _pending(self, waiting_for: str) -> pb.ExchangeResult:
        """Return the answer to a push that is not decided yet, or to a pull without room."""
        return pb.ExchangeResult(
            outcome=pb.OUTCOME_PENDING,
            version=self._engine.live.version,
            waiting_for=waiting_for,
            term=self._identity.term,
        )

    async def _send_weights(
        self, io: ExchangeIO, result: pb.ExchangeResult, seconds: float
    ) -> None:
        header, engine = self._header, self._engine
        nbytes = engine.live.require_store().step_nbytes
        if nbytes <= EAGER_BYTES and header.pull != pb.PULL_ALL:
            weights = await io.do(partial(_read_all, engine, header, result))
            return await self._send(io, result, weights)
        budget = engine.traffic.budget
        try:
            claim = await budget.take(header.worker, nbytes, seconds, io, is_push=False)
        except InFlightError as full:
            return await self._send(io, self._pending(str(full)), None)
        try:
            read = await io.do(
                partial(_begin_read, engine, header, result), abandoned=WeightRead.close
            )
            try:
                engine.traffic.statistics.count_sent(read.nbytes)
                await self._send(io, result, read)
            finally:
                read.close()
        finally:
            budget.release(claim)

    async def _send(self, io: ExchangeIO, result: pb.ExchangeResult, weights: Weights) -> None:
        began = server_spans.now()
        await io.send(result, weights, self._note_alive)
        self._record_span("send", began)

    def _record_span(self, name: str, began: float) -> None:
        server_spans.add(name, began, ((self._header.worker, self._header.seq),))


def _begin_read(
    engine: ShardEngine, header: pb.PushPullHeader, result: pb.ExchangeResult
) -> WeightRead:
    """Begin to read the weights for a pull, and describe them in `result`.

    The caller has the memory for a copy in the byte budget, and closes the read.
    """
    with engine.live.lock_weights(header.shards) as (version, store):
        return _open_read(store, version, header, result)


def _read_all(engine: ShardEngine, header: pb.PushPullHeader, result: pb.ExchangeResult) -> bytes:
    """Return all bytes of a small pull at once, and describe them in `result`."""
    with engine.live.lock_weights(header.shards) as (version, store):
        began = server_spans.now()
        read = _open_read(store, version, header, result)
        weights = b"".join(read.views())
        read.close()
        _record_copy(began, header, result)
    engine.traffic.statistics.count_sent(len(weights))
    return weights


def _write_shared(
    engine: ShardEngine, header: pb.PushPullHeader, result: pb.ExchangeResult
) -> None:
    """Copy the weights to the worker's shared memory, and describe them in `result`."""
    buffers, began = engine.traffic.shared_buffers.find(header), time.monotonic()
    with engine.live.lock_weights(header.shards) as (version, store):
        unchanged = _find_unchanged(store, version, header, result)
        if unchanged is not None:
            everything = header.pull == pb.PULL_ALL
            result.nbytes = store.copy_to(buffers.weights, everything, unchanged)
    result.pull_seconds = time.monotonic() - began
    _record_copy(began, header, result)
    engine.traffic.statistics.count_sent(result.nbytes)


def _record_copy(began: float, header: pb.PushPullHeader, result: pb.ExchangeResult) -> None:
    server_spans.add("copy", began, ((header.worker, header.seq),), result.version)


def _open_read(
    store: ParameterStore, version: int, header: pb.PushPullHeader, result: pb.ExchangeResult
) -> WeightRead:
    unchanged = _find_unchanged(store, version, header, result)
    read = store.read(unchanged is not None, header.pull == pb.PULL_ALL, unchanged or ())
    result.nbytes = read.nbytes
    return read


def _find_unchanged(
    store: ParameterStore, version: int, header: pb.PushPullHeader, result: pb.ExchangeResult
) -> Collection[int] | None:
    """Return the tensors that the worker already has; None if it has all. Also sets `result`."""
    result.version = version
    if not header.HasField("have") or header.have > version or header.pull == pb.PULL_ALL:
        return ()
    if header.have == version:
        return None
    unchanged = store.find_unchanged(version - header.have)
    result.unchanged.extend(sorted(unchanged))
    return unchanged
