"""A shard's line to the coordinator: whole reports out, log entries in, again and again until
the job ends.
"""

import contextlib
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import grpc

from pscommon.core.errors import MismatchError, PSError, TakenError, UnreachableError
from pscommon.core.formats import check_wire_format, spoken_format
from pscommon.optim import digest_of_user_defined
from pscommon.snapshot import Manifest
from pscommon.system.process_id import place
from pscommon.wire.channel import open_channel
from pscommon.wire.messages import entry_from_proto, model_from_proto, report_to_proto
from pscommon.wire.status import error_from
from psproto.v1 import coordinator_pb2 as pb
from psproto.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from psserver.core.job.settings import GradientRules
from psserver.core.job.snapshot_schedule import PartReport
from psserver.durability.record_sink import StandbyLink
from psserver.durability.snapshots import SnapshotManager
from psserver.process.identity import ServerIdentity
from psserver.process.worker_exits import WorkerExits
from psserver.shard.engine import ShardEngine
from psserver.shard.resharding import build_partition

BEAT = 1.0
"""Seconds between reports when nothing happens."""
LOOK = 0.2
"""Seconds between two looks at processes of workers, where shard 0 cannot see them."""
PAUSE = 0.2
"""Seconds before the next try when the line is cut."""
NOTICE = 8.0
"""Seconds between lines for people that say for whom this shard waits."""

log = logging.getLogger("psserver")


class CoordinatorLink:
    """Keeps the line up in a thread of its own. `ended` is set when the coordinator says stop,
    or refuses this shard.

    statistics: called for what the coordinator shows in its status. failure: why it was refused.
    line: to this shard's standby. durable: this shard writes a log. told_to_end: the job is
    over.
    """

    def __init__(
        self,
        identity: ServerIdentity,
        engine: ShardEngine,
        archive: SnapshotManager,
        statistics: Callable[[], dict[str, object]],
        patience: float,
        line: StandbyLink,
        durable: bool = False,
    ) -> None:
        self.ended = threading.Event()
        self.failure: PSError | None = None
        self._identity, self._engine, self._archive = identity, engine, archive
        self._statistics = statistics
        self._patience = patience
        self._line = line
        self._durable = durable
        self._optimizers = digest_of_user_defined()
        self._places: dict[str, None] = {}  # at which shard 0 was or may be
        self._term = 0  # the highest of the coordinators that were heard
        self.told_to_end = self._leaves = self._connected = False
        self._waiting_for = "shard 0"
        self._heard = self._said = (
            0.0  # when the coordinator last was there, and people were told that it is not
        )
        self._news = threading.Event()
        self._outbox: deque[pb.LinkShardRequest] = deque()  # of the line of now
        self._saying = threading.Lock()
        self._exits, self._watched = (
            WorkerExits(),
            dict[int, str](),
        )  # workers here, and their processes
        self._last_part: pb.LinkShardRequest | None = None
        self._call: object = None
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    def start(self) -> None:
        self._engine.report = self._news.set
        self._engine.waiting_for = lambda: self._waiting_for
        self._archive.on_part = self._part
        self._thread.start()

    def leave(self, seconds: float) -> None:
        """End with the line to shard 0, whose last snapshot has a part of this shard; after so
        long in any case.
        """
        self._leaves = True
        if not self._connected:
            self.ended.set()
        timer = threading.Timer(seconds, self.ended.set)
        timer.daemon = True
        timer.start()

    def close(self) -> None:
        self.ended.set()
        self._news.set()
        if isinstance(self._call, grpc.Call):
            self._call.cancel()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._keep_up()
        except Exception as bug:
            log.exception("this shard cannot go on")
            self._fail(PSError(f"a bug: {bug!r}"))

    def _keep_up(self) -> None:
        self._heard = self._said = time.monotonic()
        while (
            not (address := self._identity.wait_for_coordinator(BEAT)) and not self.ended.is_set()
        ):
            self._bear(
                "shard 0",
                "nobody has said where it is: give --join, or let a worker list all servers",
            )
        self._heard = self._said = time.monotonic()
        while not self.ended.is_set():
            try:
                if self._talk(address):
                    self._heard = self._said = time.monotonic()
            except (MismatchError, TakenError) as error:
                self._fail(error)
                return
            except PSError as error:
                self._bear(f"shard 0 at {address}", str(error))
            self._connected = False
            if self._leaves:
                self.ended.set()
            self._waiting_for = f"shard 0 at {address}"
            address = self._other(address)
            self.ended.wait(PAUSE)

    def _other(self, address: str) -> str:
        """Where shard 0 may be as well: its standby may have taken over, or who was primary
        before be started again.
        """
        identity = self._identity
        self._note(address, identity.coordinator, *identity.standbys[:1], identity.hint)
        places = list(self._places)
        return places[(places.index(address) + 1) % len(places)]

    def _note(self, *places: str) -> None:
        self._places.update(dict.fromkeys(place for place in places if place))

    def _bear(self, whom: str, problem: str) -> None:
        """Nobody answers: say so now and then, and give up when it has lasted too long."""
        now = time.monotonic()
        silent = now - self._heard
        if silent >= self._patience:
            self._fail(UnreachableError(f"{whom}: nothing for {silent:.0f} s: {problem}"))
        elif now - self._said >= NOTICE:
            self._said = now
            log.info(
                "waiting", extra={"waiting_for": whom, "seconds": round(silent), "problem": problem}
            )

    def _fail(self, error: PSError) -> None:
        self.failure = error
        self.ended.set()

    def _talk(self, address: str) -> bool:
        """One line, from connecting to its end. True: it did connect."""
        connected = False
        self._begin_line()
        with contextlib.closing(open_channel(address)) as channel:
            call = CoordinatorServiceStub(channel).LinkShard(self._requests(self._outbox))
            self._call = call
            try:
                for response in call:
                    check_wire_format(response.format, f"shard 0 at {address}", "this shard")
                    if not connected:
                        log.info(
                            "connected to the coordinator",
                            extra={"coordinator": address, "job": response.job},
                        )
                        self._check_durable(response)
                    if response.term < self._term:
                        raise UnreachableError(
                            f"shard 0 at {address} is not primary any more", "NOT_PRIMARY"
                        )
                    connected = self._connected = True
                    self._term = response.term
                    self._identity.find(address)  # for whoever asks this shard, and its standby
                    self._hear(response)
            except grpc.RpcError as failure:
                self._lost(error_from(failure, f"shard 0 at {address}"), address, connected)
        return connected

    def _check_durable(self, response: pb.LinkShardResponse) -> None:
        """Updates count as safe where only this shard's part of them is not: nothing goes wrong
        before it dies.
        """
        if response.durable and not self._durable:
            text = "shard 0 writes a log and this shard does not: where it dies all go back to the newest snapshot"
            log.error(text, extra={"remedy": "start it with --durability log and a --data-dir"})

    def _begin_line(self) -> None:
        """With what is still to be said. gRPC reads on for a moment where a line has ended: that
        must not take it.
        """
        with self._saying:
            again = (
                [self._last_part] if self._last_part is not None else []
            )  # it may have been under way
            self._outbox = deque(
                [*(each for each in self._outbox if each is not self._last_part), *again]
            )

    def _say(self, request: pb.LinkShardRequest) -> None:
        with self._saying:
            self._outbox.append(request)
        self._news.set()

    def _lost(self, error: PSError, address: str, connected: bool) -> None:
        """Why a line has ended, or why there was none, which is raised. One that worked will do
        so again.
        """
        if self.ended.is_set() or self._leaves:
            return
        if not connected:
            raise error
        extra = {"coordinator": address, "problem": str(error), "version": self._engine.version}
        log.warning("lost the line to the coordinator", extra=extra)

    def _requests(self, outbox: deque[pb.LinkShardRequest]) -> Iterator[pb.LinkShardRequest]:
        """A report now, then whenever there is something new, and at every beat; until this line
        is not that of now.
        """
        told, standby = 0.0, ""
        while not self.ended.is_set() and outbox is self._outbox:
            self._news.clear()
            while outbox:
                yield self._request(outbox.popleft())
            request = pb.LinkShardRequest()
            # people act on how the standby is: they hear of that at once
            if time.monotonic() - told >= BEAT or standby != self._line.state:
                told, standby = time.monotonic(), self._line.state
                request.stats_json = json.dumps(self._statistics())
                request.alive.update(self._engine.traffic.alive())
            request.report.CopyFrom(report_to_proto(self._engine.make_report()))
            request.ended.extend(self._exits.among(self._watched))
            yield self._request(request)
            self._news.wait(LOOK if self._watched else BEAT)

    def _request(self, request: pb.LinkShardRequest) -> pb.LinkShardRequest:
        identity = self._identity
        request.shard, request.shards, request.address = (
            identity.shard,
            identity.shards,
            identity.address,
        )
        request.instance, request.job = identity.instance, identity.bound
        request.optimizers = self._optimizers
        if (spoken := spoken_format()) is not None:
            request.format = spoken
        request.term, request.standby, request.place = self._line.term, self._line.address, place()
        return request

    def _part(self, part: PartReport) -> None:
        message = pb.SnapshotPart(
            version=part.version,
            index=part.cut,
            file=part.file,
            nbytes=part.nbytes,
            sha256=part.sha256,
            problem=part.problem,
        )
        self._last_part = pb.LinkShardRequest(snapshot_part=message)
        self._say(self._last_part)

    def _hear(self, response: pb.LinkShardResponse) -> None:
        self._identity.standbys = response.standbys
        self._note(
            *response.standbys[:1]
        )  # one that is lost for now may be there again when it is needed
        self._waiting_for = response.waiting_for
        self._watched = dict(response.processes)
        for worker, process in self._watched.items():
            self._exits.learn(worker, process)
        if response.addresses:  # else the job has no room for this shard, not yet or not any more
            self._follow(response)
        if response.stop:
            self.told_to_end = True
            self.ended.set()
            self._news.set()

    def _follow(self, response: pb.LinkShardResponse) -> None:
        self._identity.learn(response.job, response.addresses, response.layout)
        self._identity.policy = response.policy
        self._engine.fitness = GradientRules(response.mends, response.norms)
        if response.recover or response.HasField("restore"):
            self._restore(response)
        elif response.begin:
            self._last_part = None  # its history is over
            self._engine.begin_log(response.epoch, response.base, response.shards)
            self._news.set()
        elif response.move.state_json:
            state, model = json.loads(response.move.state_json), model_from_proto(response.model)
            self._engine.adopt(response.epoch, state, model, response.shards)
        if response.HasField("model"):
            self._engine.set_model(model_from_proto(response.model))
        if response.entries:
            self._engine.deliver(
                response.epoch, [entry_from_proto(entry) for entry in response.entries]
            )
        if (
            response.HasField("move")
            and self._engine.moving
            and self._identity.shard < response.shards
        ):
            self._move_in(response.epoch, response.move)
        elif not response.HasField("move"):
            self._engine.frozen.discard()
        if response.snapshots:
            self._archive.retain(response.snapshots, response.job)
            self._engine.snapshot_written(max(response.snapshots))

    def _move_in(self, epoch: int, move: pb.Move) -> None:
        """Make this shard's new part. Where somebody is not there now, the next response tries
        again.
        """
        identity = self._identity
        nbytes, problem = build_partition(
            self._engine, move.sources, identity.job, epoch, move.index
        )
        result = pb.MoveResult(index=move.index, nbytes=nbytes, problem=problem)
        self._say(pb.LinkShardRequest(moved=result))

    def _restore(self, response: pb.LinkShardResponse) -> None:
        """Load a snapshot, or be again what this shard was before it died."""
        told = response.HasField("restore")
        manifest = Manifest.from_json(response.restore.manifest_json) if told else None
        if response.recover:
            possible = {
                response.shards,
                *([len(response.move.sources)] if response.HasField("move") else []),
            }
            problem = self._archive.recover_into(self._engine, response.epoch, manifest, possible)
        else:
            assert manifest is not None
            problem = self._archive.load_into(
                self._engine, response.epoch, manifest, response.shards
            )
            self._last_part = None  # its history is over
        result = pb.RestoreResult(version=manifest.version if manifest else 0, problem=problem)
        self._say(pb.LinkShardRequest(restored=result))
