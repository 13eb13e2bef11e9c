"""A worker's view of the job's model: registration, initial upload, pushes and pulls."""

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

from pscommon.core.errors import (
    FencedError,
    InvalidRequestError,
    LayoutError,
    MismatchError,
    QuarantinedError,
    error_for,
)
from pscommon.core.log_entries import BatchKey
from pscommon.core.model_spec import ModelSpec
from pscommon.core.partition import PartitionPlan
from pscommon.settings.values import Lanes
from pscommon.telemetry.logs import get_logger
from pscommon.wire import messages as codec
from psproto.v1 import coordinator_pb2 as co
from psproto.v1 import parameter_server_pb2 as ps
from psworker.connection.connection import Connection
from psworker.connection.retry import RetryDeadline
from psworker.core.results import PushResult
from psworker.exchange.open_push import BufferedPush, OpenPush, PushSteps
from psworker.exchange.registration import plan_of, register
from psworker.exchange.shard_exchange import SentBefore, ShardExchange, combined
from psworker.exchange.shared_buffers import LANES, ClientBuffers
from psworker.exchange.transfer import ExchangeBuffer, ShardTransfer, digest_of
from psworker.session.arguments import check_integer
from psworker.transport.exchange_calls import AnswerReceiver, Cancellation

MAX_LOST_MEMBERSHIPS = 5
"""Memberships in a row that a rejoining worker may lose before it has registered its model."""

log = get_logger(__name__)


class ModelExchange:
    """The flat-buffer methods of `Client`, which documents their arguments.

    Call order: agree, start, then exchange.

    Attributes:
        lock: Serializes the calls of several threads.
        version: Version of the weights that were pulled last, the smallest over the shards.
            Gradients count as computed from it.
        groups_json: The optimizer's parameter groups when the model was registered.
    """

    def __init__(self, connection: Connection, observes: bool, lanes: Lanes) -> None:
        self.lock = threading.RLock()
        self.version = 0
        self.groups_json = ""
        self._connection = connection
        self._observes = observes
        self._lanes: Lanes = "grpc" if observes else lanes
        self._buffers: ClientBuffers | None = None
        self._open_push: OpenPush | None = None
        self._spec: ModelSpec | None = None
        self._plan: PartitionPlan | None = None
        self._must_upload = False
        self._has_started = False

    @property
    def plan(self) -> PartitionPlan:
        if self._plan is None:
            raise InvalidRequestError("no model is registered. Try: call register (or agree) first")
        return self._plan

    @property
    def buffers(self) -> ClientBuffers:
        """Flat buffers for gradients and weights; the fastest memory for an exchange."""
        if self._buffers is None:
            self._buffers = LANES[self._lanes](self.plan.nbytes)
        return self._buffers

    def abandon(self) -> None:
        """End a push that is still open."""
        if (push := self._open_push) is not None:
            push.abandon()

    def close(self) -> None:
        """Free the flat buffers. Views of them stay valid."""
        if self._buffers is not None:
            self._buffers.close()

    def agree(self, spec: ModelSpec | None) -> PartitionPlan:
        """Register the model and return its partition.

        spec: The worker's model; None for an observer, which takes the job's model.
        """
        if (spec is None) != self._observes:
            raise InvalidRequestError("an observer has no model to register")
        with self.lock:
            self._spec = spec
            answer = self._register()
            self._plan, self.groups_json = plan_of(self._connection, answer), answer.groups_json
            return self._plan

    def _register(self) -> co.RegisterResponse:
        answer = register(self._connection, self._spec)
        self._must_upload = answer.state == co.RegisterResponse.STATE_UPLOAD
        return answer

    def rejoin(self, reason: str) -> None:
        """Replace the worker's membership, and register the model again.

        The pulled weights stay as they are; their version becomes at most the servers' version.

        reason: Why the worker leaves its old membership.

        Raises:
            FencedError: The servers hold no weights any more.
            MismatchError: The servers hold another model.
        """
        if self._plan is None:
            self.replace_membership(reason)
            return
        answer = self._register_as_new_worker(reason)
        if self._has_started and self._must_upload:
            raise FencedError("the servers have lost the job's weights. Try: restart the script")
        plan = plan_of(self._connection, answer)
        if (plan.spec.tensors, plan.order) != (self._plan.spec.tensors, self._plan.order):
            raise MismatchError(
                "the servers hold the model in another order than before. Try: restart the script",
                "MODEL_MISMATCH",
            )
        self._plan = PartitionPlan(self._plan.spec, plan.shards)
        self.version = min(self.version, answer.version)

    def _register_as_new_worker(self, reason: str) -> co.RegisterResponse:
        left = MAX_LOST_MEMBERSHIPS
        while True:
            self.replace_membership(reason)
            left -= 1
            try:
                return self._register()
            except FencedError as error:  # the servers have rolled back in between
                if not left:
                    raise
                log.info(
                    "membership_lost_early",
                    worker=self._connection.membership.worker,
                    reason=str(error),
                )

    def replace_membership(self, reason: str) -> None:
        """Join as a new worker. reason: Why the worker leaves its old membership."""
        self._connection.rejoin(reason)
        self._reset_memory()

    def _reset_memory(self) -> None:
        if self._buffers is not None:
            self._buffers.reset()

    def start(self, weights: memoryview) -> None:
        with self.lock:
            self.check_idle()
            while self._must_upload:
                self._upload(weights)
                self._register()
            self._has_started = True
            transfer = ShardTransfer(self.plan, weights=weights, everything=True)
            self._record(*self._run(transfer, ps.PushPullHeader(pull=ps.PULL_ALL)))

    def _upload(self, weights: memoryview) -> None:
        header = ps.PushPullHeader(initial=True, pull=ps.PULL_NONE)
        transfer = ShardTransfer(self.plan, gradients=weights, everything=True)
        result = self._record(*self._run(transfer, header))
        if result.status in ("rejected", "stale"):
            reason, _, detail = result.reason.partition(": ")
            # The refusal is final for this membership. With a new one, another worker or this
            # script may upload other weights.
            self.replace_membership(f"its initial weights were refused: {detail}")
            raise error_for(reason, detail)

    def exchange(
        self,
        gradients: ExchangeBuffer | None,
        weights: ExchangeBuffer | None,
        absent: Collection[int] = (),
        samples: int = 1,
        batches: Sequence[BatchKey] = (),
        groups_json: str = "",
        base: int | None = None,
        optimizer: str = "",
    ) -> PushResult:
        pull = ps.PULL_NONE if weights is None else ps.PULL_STEP
        with self.lock:
            self.check_idle()
            transfer = self.buffers.transfer(self.plan, gradients, weights, absent)
            if gradients is None:
                return self._record(*self._run(transfer, ps.PushPullHeader(pull=pull)))
            if self._observes:
                raise InvalidRequestError("an observer cannot push")
            header = ps.PushPullHeader(
                samples=check_integer("samples", samples, 0),
                batches=codec.batches_to_proto(batches) if batches else (),
                absent=sorted(absent),
                groups_json=groups_json,
                optimizer=optimizer,
            )
            content = header.SerializeToString(deterministic=True)
            # A push whose content is that of the last push, of unknown outcome, gets its number.
            pushes = self._connection.membership.pushes
            digest = digest_of(transfer, content) if pushes.in_doubt else b""
            header.seq, repeats = pushes.open(digest)
            header.pull, header.base = pull, self.version if base is None else base
            try:
                sent = SentBefore.EARLIER if repeats else SentBefore.NEVER
                result = self._record(*self._run(transfer, header, sent))
            except InvalidRequestError:  # a server has refused the push, so it can never count
                pushes.close()
                raise
            except BaseException as error:
                pushes.fail(digest_of(transfer, content))
                if isinstance(error, QuarantinedError):
                    self._connection.membership.lose(error)
                if isinstance(error, FencedError):
                    # If another thread has closed the Client, this raises that cause instead.
                    self._connection.check()
                raise
            pushes.close()
            return result

    def check_idle(self) -> None:
        """Raise InvalidRequestError while a push is open."""
        if self._open_push is not None:
            raise InvalidRequestError("a push is under way. Try: finish or close it first")

    def _run(
        self,
        transfer: ShardTransfer,
        header: ps.PushPullHeader,
        sent: SentBefore = SentBefore.NEVER,
        watch: Callable[[Cancellation], None] | None = None,
    ) -> tuple[ShardTransfer, Sequence[ShardExchange]]:
        """Carry out a transfer with all shards; send it again while their number changes.

        watch: Receives the Cancellation of each attempt.
        """
        connection, buffers = self._connection, self.buffers
        retry: RetryDeadline | None = None
        while True:
            self._offer_memory()
            buffers.copy_in(transfer)
            try:
                connection.check()
                cancellation = Cancellation(is_alone=transfer.plan.shards == 1)
                if watch is not None:
                    watch(cancellation)
                headers = buffers.headers(transfer, header, connection.membership)
                exchanges = [
                    ShardExchange(
                        connection.transport,
                        shard,
                        shard_header,
                        part.sent,
                        AnswerReceiver(partial(transfer.views, shard)),
                        part.nbytes,
                        connection.limits,
                        cancellation,
                        sent,
                    )
                    for shard, (shard_header, part) in enumerate(
                        zip(headers, transfer.parts, strict=True)
                    )
                ]
                connection.executor.run(exchanges, cancellation)
                return transfer, exchanges
            except LayoutError as error:
                self._reset_memory()
                retry = retry or connection.new_retry("the reshard to another number of servers")
                self._relocate(error)
                retry.handle_wait(f"servers that do not know it yet: {error}")
            except BaseException:
                self._reset_memory()  # servers may still read or write it
                raise
            transfer = replace(transfer, plan=self.plan)
            sent = SentBefore.CALL if sent is SentBefore.NEVER else sent

    def _record(self, transfer: ShardTransfer, exchanges: Sequence[ShardExchange]) -> PushResult:
        """Take the weights of finished exchanges, and return their outcome."""
        self.buffers.take_weights(transfer, exchanges)
        result = combined(exchanges)
        self._connection.membership.require_version(result.version)
        if transfer.weights is not None:
            self.version = result.version
        return result

    def _offer_memory(self) -> None:
        connection, buffers = self._connection, self.buffers
        if connection.membership.worker and buffers.is_to_be_offered:
            with connection.new_retry("offering shared memory").attempt():
                buffers.offer(connection.transport, connection.membership, connection.call_seconds)

    def _relocate(self, error: LayoutError) -> None:
        """Update the servers' addresses and the partition; share no memory with former servers."""
        before = self.plan.shards
        if not self._connection.find_servers():
            log.debug("servers_unchanged", problem=str(error))
            return
        self._plan = PartitionPlan(self.plan.spec, len(self._connection.transport.addresses))
        self._reset_memory()
        log.info("reshard_followed", shards_before=before, shards=self._plan.shards)

    # ---- a push that begins before it is complete ------------------------------------------------

    def begin(self, gradients: memoryview, weights: memoryview) -> OpenPush | BufferedPush:
        """Open a push whose bytes may be sent before it is complete.

        While the outcome of the last push is unknown, the result is a `BufferedPush`: a push
        has to be complete before it can be compared with the last one.
        """
        with self.lock:
            self.check_idle()
            transfer = self.buffers.transfer(self.plan, gradients, weights, ())
            if self._observes:
                raise InvalidRequestError("an observer cannot push")
            self._offer_memory()
            pushes = self._connection.membership.pushes
            if pushes.in_doubt or self._connection.transport.direct:
                return BufferedPush(self.exchange, gradients, weights)
            seq, _ = pushes.open()
            header = ps.PushPullHeader(seq=seq, base=self.version, pull=ps.PULL_STEP)
            # not kept as an attribute: a reference cycle would delay the release of the buffers
            steps = PushSteps(
                self._run_open, self._connection.touch, self._take_decision, self._release
            )
            self._open_push = push = OpenPush(steps, self.buffers, transfer, header)
            self.buffers.pin()
            push.start()
            return push

    def _run_open(self, push: OpenPush, transfer: ShardTransfer) -> None:
        """Run the exchanges of an open push; in the thread of the push."""
        connection = self._connection
        try:
            try:
                connection.check()
                cancellation = Cancellation(is_alone=transfer.plan.shards == 1)
                headers = self.buffers.headers(transfer, push.header, connection.membership)
                exchanges: Sequence[ShardExchange] = push.open_exchanges(
                    connection.transport, headers, connection.limits, cancellation
                )
                connection.executor.run(exchanges, cancellation)
            except BaseException as error:
                self._reset_memory()  # servers may still read or write it
                if not isinstance(error, LayoutError):
                    raise
                transfer, exchanges = self._resend(push, error)
        except BaseException:
            if push.may_count:
                # The outcome is unknown. Without a digest no later push is taken for a repeat.
                connection.membership.pushes.fail(b"")
            raise
        self.buffers.take_weights(transfer, exchanges)

    def _resend(
        self, push: OpenPush, error: LayoutError
    ) -> tuple[ShardTransfer, Sequence[ShardExchange]]:
        """Send the whole push to another number of shards, once the script has finished it."""
        transfer, header = push.wait_for_end()
        if not push.is_decided:  # `finish` blocks the script, so the buffers may be remapped
            self.buffers.unpin()
        self._relocate(error)
        transfer, push.exchanges = self._run(
            replace(transfer, plan=self.plan), header, SentBefore.CALL, push.set_cancellation
        )
        push.is_resent = True
        return transfer, push.exchanges

    def _take_decision(self, result: PushResult) -> None:
        """Record the outcome of an open push; its weights count as pulled."""
        membership = self._connection.membership
        membership.pushes.close()
        membership.require_version(result.version)
        self.version = result.version

    def _release(self, push: OpenPush) -> None:
        """Release an open push that the script has closed. May be called again."""
        if self._open_push is push:
            self._open_push = None
            self.buffers.unpin()
