"""The job's model as one worker handles it: agreed on, uploaded by the first, then pushed and pulled as tapes."""

import threading
from collections.abc import Collection, Sequence

from pscommon.core.errors import InvalidRequestError, MismatchError, PSError, error_for
from pscommon.core.log import BatchKey
from pscommon.core.model import ModelSpec
from pscommon.core.tape import Plan
from pscommon.wire import codec
from psproto.v1 import coordinator_pb2 as co
from psproto.v1 import parameter_server_pb2 as ps
from psworker.connection import Connection
from psworker.core.pushes import Pushes
from psworker.exchange import SLICE_SECONDS
from psworker.parts import Move, digest_of, shard_exchanges
from psworker.results import PushResult


class SharedModel:
    """What `Client` offers on tapes, where the arguments are described. Call order: agree, start, then exchange.

    version: of the weights that were pulled last, the smallest over the shards; gradients count as computed from it.
    """

    def __init__(self, connection: Connection, observes: bool) -> None:
        self.turn = threading.RLock()
        self.version = 0
        self.groups_json = ""
        self._connection = connection
        self._observes = observes
        self._spec: ModelSpec | None = None
        self._plan: Plan | None = None
        self._must_upload = False
        self._pushes = Pushes()
        self._at_least = 0

    @property
    def plan(self) -> Plan:
        if self._plan is None:
            raise InvalidRequestError("no model yet: call register (or agree) first")
        return self._plan

    def expect(self, version: int) -> None:
        """Pulls from now on bring at least this version."""
        self._at_least = max(self._at_least, version)

    def agree(self, spec: ModelSpec | None) -> Plan:
        """spec None: an observer takes the job's model as it is."""
        if (spec is None) != self._observes:
            raise InvalidRequestError("an observer has no model of its own")
        with self.turn:
            self._spec = spec
            answer = self._register()
            plan = Plan(codec.model_from_proto(answer.model), len(self._connection.lane.addresses))
            if answer.plan_digest != plan.digest:
                raise MismatchError(
                    f"the servers of job {self._connection.place.job} place the model otherwise than this worker "
                    "does: all parts of a job need the same version of this software",
                    "MODEL_MISMATCH",
                )
            self._plan, self.groups_json = plan, answer.groups_json
            self._must_upload = answer.state == co.RegisterResponse.STATE_UPLOAD
            return plan

    def start(self, tape: memoryview) -> None:
        with self.turn:
            while self._must_upload:
                self._upload(tape)
                self._must_upload = self._register().state == co.RegisterResponse.STATE_UPLOAD
            self._exchange(Move(self.plan, weights=tape, everything=True), ps.PushPullHeader(pull=ps.PULL_ALL))

    def exchange(
        self,
        gradients: memoryview | None,
        weights: memoryview | None,
        absent: Collection[int],
        samples: int,
        batches: Sequence[BatchKey],
        groups_json: str,
    ) -> PushResult:
        move = Move(self.plan, gradients, weights, frozenset(absent))
        pull = ps.PULL_NONE if weights is None else ps.PULL_STEP
        with self.turn:
            if gradients is None:
                return self._exchange(move, ps.PushPullHeader(pull=pull))
            if self._observes or samples < 1:
                raise InvalidRequestError("an observer cannot push" if self._observes else f"samples={samples} < 1")
            header = ps.PushPullHeader(
                samples=samples,
                batches=codec.batches_to_proto(batches),
                absent=sorted(absent),
                groups_json=groups_json,
            )
            return self._push_once(move, header, pull)

    def _push_once(self, move: Move, header: ps.PushPullHeader, pull: "ps.Pull.ValueType") -> PushResult:
        """A push that got no answer and is now repeated keeps its number, so that it counts once."""
        content = header.SerializeToString(deterministic=True)
        header.pull = pull
        header.seq, repeats = self._pushes.open(digest_of(move, content) if self._pushes.in_doubt else b"")
        header.base = self.version
        try:
            result = self._exchange(move, header, repeats)
        except BaseException:
            self._pushes.fail(digest_of(move, content))
            raise
        self._pushes.close()
        return result

    def _exchange(self, move: Move, header: ps.PushPullHeader, repeats: bool = False) -> PushResult:
        lane, place = self._connection.lane, self._connection.place
        header.job, header.worker, header.min_version = place.job, place.worker, self._at_least
        result = self._connection.exchange(
            lambda limits, cancellation: shard_exchanges(lane, move, header, limits, cancellation, repeats)
        )
        self.expect(result.version)
        if move.weights is not None:
            self.version = result.version
        return result

    def _upload(self, tape: memoryview) -> None:
        header = ps.PushPullHeader(initial=True, pull=ps.PULL_NONE)
        result = self._exchange(Move(self.plan, gradients=tape, everything=True), header)
        if result.status in ("rejected", "stale"):
            raise error_for(result.reason.partition(":")[0], result.reason)

    def _register(self) -> co.RegisterResponse:
        """The answer, once there is something to do."""
        connection = self._connection
        patience = connection.patience("registering the model")
        request = co.RegisterRequest(
            job=connection.place.job,
            worker=connection.place.worker,
            model=codec.model_to_proto(self._spec) if self._spec else None,
            observe=self._observes,
        )
        while True:
            request.wait_ms = round(patience.left(SLICE_SECONDS) * 1000)
            answer = patience.ask(
                lambda: connection.lane.register(request, request.wait_ms / 1000 + connection.call_seconds)
            )
            if answer.state in (co.RegisterResponse.STATE_READY, co.RegisterResponse.STATE_UPLOAD):
                return answer
            if answer.state != co.RegisterResponse.STATE_PENDING:
                raise PSError(f"shard 0 answered to Register with state {answer.state}")
            patience.waited(answer.waiting_for)
