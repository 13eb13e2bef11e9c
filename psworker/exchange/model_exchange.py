"""The job's model as one worker handles it: agreed on, uploaded by the first, then pushed and
pulled as tapes.
"""

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
"""So often a worker that comes back gets a place which is lost before the model is stated there."""

log = logging.getLogger("psworker")


class ModelExchange:
    """What `Client` offers on tapes, where the arguments are described. Call order: agree,
    start, then exchange.

    version: of the weights that were pulled last, the smallest over the shards; gradients count
    as computed from it.
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
        """Memory for gradients and weights, which is fastest to exchange."""
        if self._tapes is None:
            self._tapes = ClientBuffers(self.plan.nbytes, self._lanes)
        return self._tapes

    def abandon(self) -> None:
        """Ends a flow that is still open."""
        if (flow := self._flow) is not None:
            flow.abandon()

    def close(self) -> None:
        """Views of the tapes stay valid."""
        if self._tapes is not None:
            self._tapes.close()

    def agree(self, spec: ModelSpec | None) -> PartitionPlan:
        """spec None: an observer takes the job's model as it is."""
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
                f"this worker does: all "
                "parts of a job need the same version of this software",
                "MODEL_MISMATCH",
            )
        return plan

    def come_back(self, reason: str) -> None:
        """Gives up the worker's place, for this reason; gets a new one in the same job, and
        states the model there.

        What was pulled before stays as it is; its version counts as no newer than what the
        servers hold now. FencedError where they hold no weights any more, MismatchError where
        they hold another model.
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
        """What a new place is told about the model."""
        left = MOST_PLACES
        while True:
            self.change_place(reason)
            left -= 1
            try:
                return self._register()
            except FencedError as error:  # the servers went back to a snapshot meanwhile
                if not left:
                    raise
                log.info(
                    "worker %d lost its place before it began: %s",
                    self._connection.place.worker,
                    error,
                )

    def change_place(self, reason: str) -> None:
        """Gives up the worker's place, for this reason, and gets a new one in the same job."""
        self._connection.rejoin(reason)
        self.withdraw()

    def withdraw(self) -> None:
        """Nothing is known of the worker's memory where it asks next."""
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
        """A push that may leave before it is complete. One whose last one is in doubt has to be
        complete first.
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
        """Runs a flow to its end, in a thread of its own."""
        try:
            move, parts = self._carried_open(flow, move)
        except BaseException:
            if (
                flow.may_count
            ):  # nobody knows what became of it; the same again cannot be told from another
                self._connection.place.pushes.fail(b"")
            raise
        self._took(move, parts)

    def _closed(self, flow: OpenPush) -> None:
        """The script has closed its flow. Harmless to repeat."""
        if self._flow is flow:
            self._flow = None
            self.tapes.release()

    def _carried_open(
        self, flow: OpenPush, move: ShardTransfer
    ) -> tuple[ShardTransfer, Sequence[ShardExchange]]:
        """If there is another number of servers by now, everything goes to them once the script
        has finished it.
        """
        try:
            return move, self._carried(move, flow.header, flow.open_parts)
        except LayoutError as error:
            move, header = flow.closed()
            if not flow.decided:  # so the script waits for all of this in finish
                self.tapes.release()
            self._relocate(error)
            move = replace(move, plan=self.plan)
            move, flow.parts = self._carried_anywhere(
                move, header, SentBefore.CALL, flow.can_be_given_up
            )
            flow.resent = True
            return move, flow.parts

    def _decided(self, result: PushResult) -> None:
        """How a flow's push ended; its weights count as pulled."""
        place = self._connection.place
        place.pushes.close()
        place.expect(result.version)
        self.version = result.version

    def check_idle(self) -> None:
        """InvalidRequestError while a flow is open."""
        if self._flow is not None:
            raise InvalidRequestError("a push is under way: finish or close it first")

    def _push_once(
        self, move: ShardTransfer, header: ps.PushPullHeader, pull: "ps.Pull.ValueType", base: int
    ) -> PushResult:
        """A push that got no answer and is now repeated keeps its number, so that it counts
        once.
        """
        content = header.SerializeToString(deterministic=True)
        header.pull = pull
        pushes = self._connection.place.pushes
        header.seq, repeats = pushes.open(digest_of(move, content) if pushes.in_doubt else b"")
        header.base = base
        try:
            result = self._exchange(move, header, repeats)
        except InvalidRequestError:  # a server has refused it, so it can never count
            pushes.close()
            raise
        except BaseException as error:
            pushes.fail(digest_of(move, content))
            if isinstance(error, QuarantinedError):
                self._connection.place.lose(error)
            if isinstance(error, FencedError):
                # where another thread has closed the Client meanwhile, that is why
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
        """To the servers that there are, however many. While their number changes it is sent again.

        watch: told how each attempt can be given up.
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
        """Find the servers. Those that had attached this worker's memory hold another part of
        the model now.
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
        """Runs the parts of all shards."""
        connection, tapes = self._connection, self.tapes
        exchanges = ShardExchangeFactory(
            connection.lane, move, tapes.number, tapes.shards, self._versions(move, header)
        )
        try:
            return connection.exchange(partial(parts, exchanges))
        except BaseException:
            self._have = None
            tapes.detach()  # servers may still work on what this call left
            raise

    def _versions(self, move: ShardTransfer, header: ps.PushPullHeader) -> list[int] | None:
        """What the tape for the weights holds, where that is known and the rest will do. A pull
        alone is for all.
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
            # the servers have decided on this worker's weights: others may have better ones, and so
            # may this script
            self.change_place(f"its initial weights were refused: {detail}")
            raise error_for(reason, detail)

    def _register(self) -> co.RegisterResponse:
        """The answer, once there is something to do."""
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
                if (
                    connection.place.worker
                ):  # a shard that was just restarted may be behind what the others have
                    connection.place.expect(answer.version)
                return answer
            if answer.state != co.RegisterResponse.STATE_PENDING:
                raise PSError(f"shard 0 answered to Register with state {answer.state}")
            retry.handle_wait(answer.waiting_for)
