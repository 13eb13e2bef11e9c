"""A worker's view of the job's model: registration, initial upload, pushes and pulls."""

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

from pscommon.core.errors import (
    FencedError,
    InvalidRequestError,
    LayoutError,
    MismatchError,
    PSError,
    QuarantinedError,
    error_for,
)
from pscommon.core.log_entries import BatchKey
from pscommon.core.model_spec import ModelSpec
from pscommon.core.partition import PartitionPlan
from pscommon.settings.values import Lanes
from pscommon.wire import messages as codec
from psproto.v1 import coordinator_pb2 as co
from psproto.v1 import parameter_server_pb2 as ps
from psworker.connection.connection import Connection
from psworker.connection.retry import RetryDeadline, TimeLimits
from psworker.connection.shard_call import SLICE_SECONDS
from psworker.core.results import PushResult
from psworker.exchange.buffered_push import BufferedPush
from psworker.exchange.open_push import OpenPush, PushSteps
from psworker.exchange.shard_exchange import SentBefore, ShardExchange, combined
from psworker.exchange.shared_buffers import ClientBuffers
from psworker.exchange.transfer import ShardExchangeFactory, ShardTransfer, digest_of
from psworker.session.arguments import whole
from psworker.transport.streams import Cancellation

MOST_PLACES = 5
"""Memberships in a row that a rejoining worker may lose before it has registered its model."""

log = logging.getLogger("psworker")


class ModelExchange:
    """The flat-buffer methods of `Client`, which documents their arguments.

    Call order: agree, start, then exchange.

    Attributes:
        turn: Lock that serializes the calls of several threads.
        version: Version of the weights that were pulled last, the smallest over the shards.
            Gradients count as computed from it.
        groups_json: The optimizer's parameter groups when the model was registered.
    """

    def __init__(self, connection: Connection, observes: bool, lanes: Lanes) -> None:
        self.turn = threading.RLock()
        self.version = 0
        self.groups_json = ""
        self._connection = connection
        self._observes = observes
        self._lanes: Lanes = "grpc" if observes else lanes
        self._tapes: ClientBuffers | None = None
        self._flow: OpenPush | None = None
        self._have: tuple[memoryview, list[int]] | None = None
        self._spec: ModelSpec | None = None
        self._plan: PartitionPlan | None = None
        self._must_upload = False
        self._started = False

    @property
    def plan(self) -> PartitionPlan:
        if self._plan is None:
            raise InvalidRequestError("no model yet: call register (or agree) first")
        return self._plan

    @property
    def tapes(self) -> ClientBuffers:
        """Flat buffers for gradients and weights; the fastest memory for an exchange."""
        if self._tapes is None:
            self._tapes = ClientBuffers(self.plan.nbytes, self._lanes)
        return self._tapes

    def abandon(self) -> None:
        """End a push stream that is still open."""
        if (flow := self._flow) is not None:
            flow.abandon()

    def close(self) -> None:
        """Free the flat buffers. Views of them stay valid."""
        if self._tapes is not None:
            self._tapes.close()

    def agree(self, spec: ModelSpec | None) -> PartitionPlan:
        """Register the model and return its partition.

        spec: The worker's model; None for an observer, which takes the job's model.
        """
        if (spec is None) != self._observes:
            raise InvalidRequestError("an observer has no model of its own")
        with self.turn:
            self._spec = spec
            answer = self._register()
            self._plan, self.groups_json = self._planned(answer), answer.groups_json
            return self._plan

    def _planned(self, answer: co.RegisterResponse) -> PartitionPlan:
        plan = PartitionPlan(
            codec.model_from_proto(answer.model), len(self._connection.lane.addresses)
        )
        if answer.plan_digest != plan.digest and self._connection.find_servers():
            plan = PartitionPlan(plan.spec, len(self._connection.lane.addresses))
        if answer.plan_digest != plan.digest:
            raise MismatchError(
                f"the servers of job {self._connection.place.job} place the model otherwise than "
                "this worker does: all parts of a job need the same version of this software",
                "MODEL_MISMATCH",
            )
        return plan

    def come_back(self, reason: str) -> None:
        """Replace the worker's membership, and register the model again.

        The pulled weights stay as they are; their version becomes at most the servers' version.

        reason: Why the worker leaves its old membership.

        Raises:
            FencedError: The servers hold no weights any more.
            MismatchError: The servers hold another model.
        """
        if self._plan is None:
            self.change_place(reason)
            return
        answer = self._entered(reason)
        if self._started and self._must_upload:
            raise FencedError("the servers have lost the job's weights: start the script again")
        plan = self._planned(answer)
        if (plan.spec.tensors, plan.order) != (self._plan.spec.tensors, self._plan.order):
            raise MismatchError("the servers keep the model in another order now", "MODEL_MISMATCH")
        self._plan = PartitionPlan(self._plan.spec, plan.shards)
        self.version = min(self.version, answer.version)

    def _entered(self, reason: str) -> co.RegisterResponse:
        left = MOST_PLACES
        while True:
            self.change_place(reason)
            left -= 1
            try:
                return self._register()
            except FencedError as error:  # the servers have rolled back in between
                if not left:
                    raise
                log.info(
                    "worker %d lost its place before it began: %s",
                    self._connection.place.worker,
                    error,
                )

    def change_place(self, reason: str) -> None:
        """Replace the worker's membership. reason: Why the worker leaves its old one."""
        self._connection.rejoin(reason)
        self.withdraw()

    def withdraw(self) -> None:
        """Discard what servers know of this worker's memory: shared memory, received versions."""
        self._have = None
        if self._tapes is not None:
            self._tapes.detach()

    def start(self, tape: memoryview) -> None:
        with self.turn:
            while self._must_upload:
                self._upload(tape)
                self._register()
            self._started = True
            self._exchange(
                ShardTransfer(self.plan, weights=tape, everything=True),
                ps.PushPullHeader(pull=ps.PULL_ALL),
            )

    def exchange(
        self,
        gradients: memoryview | None,
        weights: memoryview | None,
        absent: Collection[int],
        samples: int,
        batches: Sequence[BatchKey],
        groups_json: str,
        base: int | None,
    ) -> PushResult:
        move = ShardTransfer(self.plan, gradients, weights, frozenset(absent))
        pull = ps.PULL_NONE if weights is None else ps.PULL_STEP
        with self.turn:
            if gradients is None:
                return self._exchange(move, ps.PushPullHeader(pull=pull))
            if self._observes:
                raise InvalidRequestError("an observer cannot push")
            header = ps.PushPullHeader(
                samples=whole("samples", samples, 1),
                batches=codec.batches_to_proto(batches),
                absent=sorted(absent),
                groups_json=groups_json,
            )
            return self._push_once(move, header, pull, self.version if base is None else base)

    def begin(self, gradients: memoryview, weights: memoryview) -> OpenPush | BufferedPush:
        """Open a push whose bytes may be sent before it is complete.

        While the outcome of the last push is unknown, the result is a `BufferedPush`: a push
        has to be complete before it can be compared with the last one.
        """
        move = ShardTransfer(self.plan, gradients, weights)
        with self.turn:
            self.check_idle()
            if self._observes:
                raise InvalidRequestError("an observer cannot push")
            self._offer()
            pushes = self._connection.place.pushes
            if pushes.in_doubt or self._connection.lane.direct:
                return BufferedPush(self.exchange, gradients, weights)
            seq, _ = pushes.open()
            header = ps.PushPullHeader(seq=seq, base=self.version, pull=ps.PULL_STEP)
            # not kept as an attribute: a reference cycle would delay the release of the buffers
            steps = PushSteps(self._carry, self._connection.touch, self._decided, self._closed)
            self._flow = flow = OpenPush(steps, self.tapes, move, self._addressed(header))
            self.tapes.hold()
            flow.start()
            return flow

    def _carry(self, flow: OpenPush, move: ShardTransfer) -> None:
        try:
            move, parts = self._carried_open(flow, move)
        except BaseException:
            if flow.may_count:
                # The outcome is unknown. Without a digest no later push is taken for a repeat.
                self._connection.place.pushes.fail(b"")
            raise
        self._took(move, parts)

    def _closed(self, flow: OpenPush) -> None:
        """Release the push stream that the script has closed. May be called again."""
        if self._flow is flow:
            self._flow = None
            self.tapes.release()

    def _carried_open(
        self, flow: OpenPush, move: ShardTransfer
    ) -> tuple[ShardTransfer, Sequence[ShardExchange]]:
        """Carry out a push stream.

        After a change of the number of shards, send the whole push again once the script has
        finished it.
        """
        try:
            return move, self._carried(move, flow.header, flow.open_parts)
        except LayoutError as error:
            move, header = flow.closed()
            if not flow.decided:  # `finish` blocks the script, so the buffers may be remapped
                self.tapes.release()
            self._relocate(error)
            move = replace(move, plan=self.plan)
            move, flow.parts = self._carried_anywhere(
                move, header, SentBefore.CALL, flow.can_be_given_up
            )
            flow.resent = True
            return move, flow.parts

    def _decided(self, result: PushResult) -> None:
        """Record the outcome of a push stream; its weights count as pulled."""
        place = self._connection.place
        place.pushes.close()
        place.expect(result.version)
        self.version = result.version

    def check_idle(self) -> None:
        """Raise InvalidRequestError while a push stream is open."""
        if self._flow is not None:
            raise InvalidRequestError("a push is under way: finish or close it first")

    def _push_once(
        self, move: ShardTransfer, header: ps.PushPullHeader, pull: "ps.Pull.ValueType", base: int
    ) -> PushResult:
        """Push, with the number of the last push if this one repeats it: then it counts once."""
        content = header.SerializeToString(deterministic=True)
        header.pull = pull
        pushes = self._connection.place.pushes
        header.seq, repeats = pushes.open(digest_of(move, content) if pushes.in_doubt else b"")
        header.base = base
        try:
            result = self._exchange(move, header, repeats)
        except InvalidRequestError:  # a server has refused the push, so it can never count
            pushes.close()
            raise
        except BaseException as error:
            pushes.fail(digest_of(move, content))
            if isinstance(error, QuarantinedError):
                self._connection.place.lose(error)
            if isinstance(error, FencedError):
                # If another thread has closed the Client, this raises that cause instead.
                self._connection.check()
            raise
        pushes.close()
        return result

    def _exchange(
        self, move: ShardTransfer, header: ps.PushPullHeader, repeats: bool = False
    ) -> PushResult:
        self.check_idle()
        move, parts = self._carried_anywhere(
            move, header, SentBefore.EARLIER if repeats else SentBefore.NEVER
        )
        self._took(move, parts)
        result = combined(parts)
        self._connection.place.expect(result.version)
        if move.weights is not None:
            self.version = result.version
        return result

    def _carried_anywhere(
        self,
        move: ShardTransfer,
        header: ps.PushPullHeader,
        sent: SentBefore,
        watch: Callable[[Cancellation], None] = lambda given_up: None,
    ) -> tuple[ShardTransfer, Sequence[ShardExchange]]:
        """Carry out a transfer with all shards; send it again while their number changes.

        watch: Receives the Cancellation of each attempt.
        """

        def parts(
            exchanges: ShardExchangeFactory, limits: TimeLimits, given_up: Cancellation
        ) -> Sequence[ShardExchange]:
            watch(given_up)
            return exchanges.parts(header, limits, given_up, sent)

        retry: RetryDeadline | None = None
        while True:
            self._offer()
            self.tapes.take_in(move)
            self._addressed(header)
            try:
                return move, self._carried(move, header, parts)
            except LayoutError as error:
                retry = retry or self._connection.new_retry("the move to another number of servers")
                self._relocate(error)
                retry.handle_wait(f"servers that do not all know of it yet: {error}")
            move = replace(move, plan=self.plan)
            sent = SentBefore.CALL if sent is SentBefore.NEVER else sent

    def _relocate(self, error: LayoutError) -> None:
        """Update the servers' addresses and the partition.

        Withdraws the shared memory: the shards that attached it hold other byte ranges now.
        """
        before = self.plan.shards
        if not self._connection.find_servers():
            log.debug("the servers are as they were: %s", error)
            return
        self._plan = PartitionPlan(self.plan.spec, len(self._connection.lane.addresses))
        self.withdraw()
        log.info(
            "the job has moved from %d to %d servers: going on there", before, self._plan.shards
        )

    def _offer(self) -> None:
        connection, tapes = self._connection, self.tapes
        if connection.place.worker and tapes.is_to_be_offered:
            offer = partial(tapes.offer, connection.lane, connection.place, connection.call_seconds)
            connection.new_retry("offering shared memory").once(offer)

    def _addressed(self, header: ps.PushPullHeader) -> ps.PushPullHeader:
        place = self._connection.place
        header.job, header.worker, header.min_version = place.job, place.worker, place.at_least
        return header

    def _carried(
        self,
        move: ShardTransfer,
        header: ps.PushPullHeader,
        parts: Callable[[ShardExchangeFactory, TimeLimits, Cancellation], Sequence[ShardExchange]],
    ) -> Sequence[ShardExchange]:
        connection, tapes = self._connection, self.tapes
        exchanges = ShardExchangeFactory(
            connection.lane, move, tapes.number, tapes.shards, self._versions(move, header)
        )
        try:
            return connection.exchange(partial(parts, exchanges))
        except BaseException:
            self._have = None
            tapes.detach()  # servers may still read or write the memory of this failed call
            raise

    def _versions(self, move: ShardTransfer, header: ps.PushPullHeader) -> list[int] | None:
        """Return the version by shard that the weights buffer holds; None asks for all tensors.

        A pull without a push always asks for all tensors.
        """
        known = self._have
        pushes = header.seq > 0 and header.pull == ps.PULL_STEP
        return known[1] if known is not None and pushes and known[0] is move.weights else None

    def _took(self, move: ShardTransfer, parts: Sequence[ShardExchange]) -> None:
        tapes, lost = self.tapes, [shard for shard, part in enumerate(parts) if part.lost_memory]
        tapes.give_out(move, lost)
        if move.weights is not None:
            self._have = move.weights, [part.version for part in parts]
        if lost:
            tapes.detach()

    def _upload(self, tape: memoryview) -> None:
        header = ps.PushPullHeader(initial=True, pull=ps.PULL_NONE)
        result = self._exchange(ShardTransfer(self.plan, gradients=tape, everything=True), header)
        if result.status in ("rejected", "stale"):
            reason, _, detail = result.reason.partition(": ")
            # The refusal is final for this membership. With a new one, another worker or this
            # script may upload other weights.
            self.change_place(f"its initial weights were refused: {detail}")
            raise error_for(reason, detail)

    def _register(self) -> co.RegisterResponse:
        """Register the model; return the answer once the weights are ready or to be uploaded."""
        connection = self._connection
        retry = connection.new_retry("registering the model")
        request = co.RegisterRequest(
            job=connection.place.job,
            worker=connection.place.worker,
            model=codec.model_to_proto(self._spec) if self._spec else None,
            observe=self._observes,
        )
        while True:
            request.wait_ms = round(retry.next_wait_seconds(SLICE_SECONDS) * 1000)
            answer = retry.ask(
                lambda: connection.lane.register(
                    request, request.wait_ms / 1000 + connection.call_seconds
                )
            )
            connection.place.learn_standing(answer)
            if answer.state in (co.RegisterResponse.STATE_READY, co.RegisterResponse.STATE_UPLOAD):
                self._must_upload = answer.state == co.RegisterResponse.STATE_UPLOAD
                if connection.place.worker:
                    # A shard that was just restarted may be behind the other shards.
                    connection.place.expect(answer.version)
                return answer
            if answer.state != co.RegisterResponse.STATE_PENDING:
                raise PSError(f"shard 0 answered to Register with state {answer.state}")
            retry.handle_wait(answer.waiting_for)
