"""A worker's view of the job's model: registration, initial upload, pushes and pulls."""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from pscommon.core.errors import (
    FencedError,
    InvalidRequestError,
    MismatchError,
    PSError,
    QuarantinedError,
    error_for,
)
from pscommon.core.log_entries import BatchKey
from pscommon.core.model_spec import ModelSpec
from pscommon.core.partition import PartitionPlan
from pscommon.settings.values import Lanes
from pscommon.telemetry.logs import get_logger
from pscommon.tracing.recorder import worker_spans
from pscommon.wire import messages as codec
from pscommon.wire.requests import REGISTER
from psproto.v1 import coordinator_pb2 as co
from psproto.v1 import parameter_server_pb2 as ps
from psworker.connection.connection import Connection
from psworker.core.results import PushResult
from psworker.exchange.all_shards import AllShards
from psworker.exchange.client_buffers import LANES
from psworker.exchange.open_push import BufferedPush, OpenPush
from psworker.exchange.shard_exchange import SentBefore
from psworker.exchange.transfer import EmptyTransfer, ExchangeBuffer, ShardTransfer, digest_of
from psworker.session.arguments import check_integer

MAX_LOST_MEMBERSHIPS = 5
"""Memberships in a row that a rejoining worker may lose before it has registered its model."""

log = get_logger(__name__)


class ModelExchange:
    """The job's model, as flat buffers of plan.nbytes bytes.

    Call order: agree, start, then exchange. The calls of several threads run one after another.
    The errors are those of `psworker.Client`.

    Attributes:
        lock: Serializes the calls of several threads.
        groups_json: The optimizer's parameter groups when the model was registered.
        offer_weights: See `offer_with`.
    """

    def __init__(self, connection: Connection, observes: bool, lanes: Lanes) -> None:
        self.lock = threading.RLock()
        self.groups_json = ""
        self.offer_weights: Callable[[], None] = lambda: None
        self._connection = connection
        self._observes = observes
        self._lanes: Lanes = "grpc" if observes else lanes
        self._shards: AllShards | None = None
        self._open_push: OpenPush | None = None
        self._spec: ModelSpec | None = None
        self._must_upload = False
        self._has_started = False

    @property
    def shards(self) -> AllShards:
        """The shards of the registered model; InvalidRequestError before."""
        if self._shards is None:
            raise InvalidRequestError("no model is registered. Try: call register (or agree) first")
        return self._shards

    @property
    def version(self) -> int:
        """Version of the weights that were pulled last, the smallest over the shards."""
        return 0 if self._shards is None else self._shards.version

    @property
    def update_counts(self) -> Mapping[str, int]:
        """Number of updates of each optimizer when the model was registered.

        Empty in a job with one optimizer.
        """
        return self._connection.membership.update_counts

    def offer_with(self, offer: Callable[[], None]) -> None:
        """Set what is called while a request waits, if another worker waits for the weights that
        this one has (policy allreduce).
        """
        self.offer_weights = offer

    def agree(self, spec: ModelSpec | None) -> PartitionPlan:
        """Register the model and return its partition, in the job's order of tensors.

        Waits for the first worker's weights, unless this worker is the first.

        spec: The worker's model; None for an observer, which takes the job's model.

        Raises:
            MismatchError: The job trains another model; the message shows the differences by
                tensor.
        """
        if (spec is None) != self._observes:
            raise InvalidRequestError("an observer has no model to register")
        with self.lock:
            self._spec = spec
            answer = self._register()
            plan, self.groups_json = self._plan_of(answer), answer.groups_json
            worker_spans.open_push(self._connection.membership.worker, 1)
            if self._shards is None:
                self._shards = AllShards(self._connection, plan, LANES[self._lanes](plan.nbytes))
            self._shards.plan = plan
            return plan

    def _register(self) -> co.RegisterResponse:
        """Return the coordinator's answer once the weights are ready, or are to be uploaded."""
        connection, membership = self._connection, self._connection.membership
        retry = connection.new_retry("registering the model")
        request = co.RegisterRequest(
            job=membership.job,
            worker=membership.worker,
            model=codec.model_to_proto(self._spec) if self._spec else None,
            observe=self._spec is None,
            seed=connection.seed,
        )
        while True:
            wait_seconds = retry.next_wait_seconds()
            request.wait_ms = round(wait_seconds * 1000)
            answer = retry.ask(REGISTER, request, wait_seconds)
            membership.learn_standing(answer)
            membership.update_counts = dict(answer.updates)
            if answer.state in (co.RegisterResponse.STATE_READY, co.RegisterResponse.STATE_UPLOAD):
                connection.seed = answer.seed
                if membership.worker:
                    # A shard that was just restarted may be behind the other shards.
                    membership.require_version(answer.version)
                self._must_upload = answer.state == co.RegisterResponse.STATE_UPLOAD
                return answer
            if answer.state != co.RegisterResponse.STATE_PENDING:
                raise PSError(f"shard 0 answered to Register with state {answer.state}")
            retry.handle_wait(answer.waiting_for)

    def _plan_of(self, answer: co.RegisterResponse) -> PartitionPlan:
        """Return the partition of the registered model.

        Raises:
            MismatchError: The servers have another partition of the same model.
        """
        connection, model = self._connection, codec.model_from_proto(answer.model)
        plan = PartitionPlan(model, len(connection.transport.addresses))
        if answer.plan_digest != plan.digest and connection.find_servers():
            plan = PartitionPlan(plan.spec, len(connection.transport.addresses))
        if answer.plan_digest != plan.digest:
            raise MismatchError(
                f"the servers of job {connection.membership.job} have another partition of the "
                "model: they run another version of this software. Try: one version for the whole "
                "job",
                "MODEL_MISMATCH",
            )
        return plan

    def rejoin(self, reason: str) -> None:
        """Replace the worker's membership, and register the model again.

        The pulled weights stay as they are; their version becomes at most the servers' version.

        reason: Why the worker leaves its old membership.

        Raises:
            FencedError: The servers hold no weights any more.
            MismatchError: The servers hold another model.
        """
        with self.lock:
            self.check_idle()
            self._connection.membership.check_curable()
            shards = self._shards
            if shards is None:
                self._connection.rejoin(reason)
                return
            answer = self._register_as_new_worker(reason)
            if self._has_started and self._must_upload:
                raise FencedError(
                    "the servers have lost the job's weights. Try: restart the script"
                )
            plan, spec = self._plan_of(answer), shards.plan.spec
            if (plan.spec.tensors, plan.order) != (spec.tensors, shards.plan.order):
                raise MismatchError(
                    "the servers hold the model in another order than before. Try: restart the "
                    "script",
                    "MODEL_MISMATCH",
                )
            shards.plan = PartitionPlan(spec, plan.shards)
            shards.version = min(shards.version, answer.version)

    def _register_as_new_worker(self, reason: str) -> co.RegisterResponse:
        left = MAX_LOST_MEMBERSHIPS
        while True:
            self._replace_membership(reason)
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

    def retire(self, reason: str) -> None:
        """Join as a new worker, which only observes. reason: Why the old one leaves."""
        with self.lock:
            self.check_idle()
            self._replace_membership(reason)

    def _replace_membership(self, reason: str) -> None:
        self._connection.rejoin(reason)
        if self._shards is not None:
            self._shards.buffers.reset()

    def flat_buffers(self) -> tuple[memoryview, memoryview]:
        """Return flat buffers for gradients and for weights.

        They are the fastest memory for start and exchange: servers on this host access it.
        """
        buffers = self.shards.buffers
        return buffers.gradients, buffers.weights

    def start(self, weights: memoryview) -> None:
        """Upload the weights if this worker is the job's first, then load the job's weights.

        weights: Writable flat buffer.
        """
        with self.lock:
            self.check_idle()
            while self._must_upload:
                self._upload(weights)
                self._register()
            self._has_started = True
            transfer = ShardTransfer(self.shards.plan, weights=weights, everything=True)
            header = ps.PushPullHeader(pull=ps.PULL_ALL)
            self.shards.record(*self.shards.run(transfer, header))

    def _upload(self, weights: memoryview) -> None:
        header = ps.PushPullHeader(initial=True, pull=ps.PULL_NONE)
        transfer = ShardTransfer(self.shards.plan, gradients=weights, everything=True)
        result = self.shards.record(*self.shards.run(transfer, header))
        if result.status in ("rejected", "stale"):
            reason, _, detail = result.reason.partition(": ")
            # The refusal is final for this membership. With a new one, another worker or this
            # script may upload other weights.
            self._replace_membership(f"its initial weights were refused: {detail}")
            raise error_for(reason, detail)

    def exchange(
        self,
        *,
        gradients: ExchangeBuffer | None,
        weights: ExchangeBuffer | None,
        absent: Collection[int] = (),
        samples: int = 1,
        batches: Sequence[BatchKey] = (),
        groups_json: str = "",
        base: int | None = None,
        optimizer: str = "",
        reduce_round: int = 0,
        states: Mapping[str, memoryview] | None = None,
        state_json: str = "",
    ) -> PushResult:
        """Push, pull, or both.

        Only trainable tensors and buffers are transferred. After an error `weights` may hold a
        mixture of versions: pull again.

        Args:
            gradients: Bytes to push; None: no push.
            weights: Writable bytes for the pull; None: no pull.
            absent: Trainable tensors without a gradient, by index into plan.spec.tensors.
            samples: Weight in a round's average; 0: buffers of version `base`, without an update.
            batches: Batches that the push commits.
            groups_json: Hyper-parameters of the optimizer's groups, for this push alone; empty:
                those of the update before.
            base: Version that the gradient was computed from; None: the last pulled version.
            optimizer: Name of the optimizer whose step this is. `absent` has the trainable
                tensors of the others.
            reduce_round: Number of a reduce round: the push has no bytes.
            states, state_json: Of an upload, the optimizer state as in ShardTransfer and
                PushPullHeader; `gradients` has the weights.

        Returns:
            The outcome of the push; "none" without a push.
        """
        pull = ps.PULL_NONE if weights is None else ps.PULL_STEP
        with self.lock:
            self.check_idle()
            shards = self.shards
            transfer = shards.buffers.transfer(shards.plan, gradients, weights, absent)
            if reduce_round:
                transfer = EmptyTransfer(shards.plan, gradients)
            elif states is not None:
                transfer = ShardTransfer(shards.plan, gradients, everything=True, states=states)
            if gradients is None:
                return shards.record(*shards.run(transfer, ps.PushPullHeader(pull=pull)))
            if self._observes:
                raise InvalidRequestError("an observer cannot push")
            header = ps.PushPullHeader(
                samples=check_integer("samples", samples, 0),
                batches=codec.batches_to_proto(batches) if batches else (),
                absent=sorted(absent),
                groups_json=groups_json,
                optimizer=optimizer,
                reduce_round=reduce_round,
                upload=states is not None,
                state_json=state_json,
            )
            content = header.SerializeToString(deterministic=True)
            # A push whose content is that of the last push, of unknown outcome, gets its number.
            pushes = self._connection.membership.pushes
            digest = digest_of(transfer, content) if pushes.in_doubt else b""
            header.seq, repeats = pushes.open(digest)
            header.pull, header.base = pull, shards.version if base is None else base
            try:
                sent = SentBefore.EARLIER if repeats else SentBefore.NEVER
                result = shards.record(*shards.run(transfer, header, sent))
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

    def each_rank(self, flag: bool) -> Sequence[bool]:
        """Return what each rank of this worker's group passes: it has one process."""
        return (flag,)

    # ---- a push that begins before it is complete ------------------------------------------------

    def begin(self) -> OpenPush | BufferedPush:
        """Open a push from and a pull into `flat_buffers()`, byte range by byte range.

        Only one can be open. While the outcome of the last push is unknown, the result is a
        `BufferedPush`: a push has to be complete before it can be compared with the last one.
        """
        with self.lock:
            self.check_idle()
            shards, (gradients, weights) = self.shards, self.flat_buffers()
            transfer = shards.buffers.transfer(shards.plan, gradients, weights, ())
            if self._observes:
                raise InvalidRequestError("an observer cannot push")
            if shards.buffers.is_to_be_offered:
                shards.offer_memory()
            pushes = self._connection.membership.pushes
            if pushes.in_doubt or self._connection.transport.direct:
                return BufferedPush(partial(self.exchange, gradients=gradients, weights=weights))
            seq, _ = pushes.open()
            worker_spans.open_push(self._connection.membership.worker, seq)
            header = ps.PushPullHeader(seq=seq, base=shards.version, pull=ps.PULL_STEP)
            self._open_push = push = OpenPush(shards, transfer, header, self._release)
            push.start()
            return push

    def check_idle(self) -> None:
        """Raise InvalidRequestError while a push is open."""
        if self._open_push is not None:
            raise InvalidRequestError("a push is under way. Try: finish or close it first")

    def abandon(self) -> None:
        """End a push that is still open."""
        if (push := self._open_push) is not None:
            push.abandon()

    def _release(self, push: OpenPush) -> None:
        """Forget an open push that the script has closed. May be called again."""
        if self._open_push is push:
            self._open_push = None
            self.shards.buffers.unpin()
