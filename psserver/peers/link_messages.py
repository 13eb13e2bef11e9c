"""What a shard sends to the coordinator: reports, statistics, and results of what it was told."""

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from pscommon.core.formats import spoken_format
from pscommon.optim import digest_of_user_defined
from pscommon.system.process_id import pid_namespace
from pscommon.tracing.batch import encode_spans
from pscommon.tracing.clock_offset import OffsetEstimate
from pscommon.tracing.recorder import server_spans
from pscommon.wire.messages import report_to_proto
from psproto.v1 import coordinator_pb2 as pb
from psserver.core.job.snapshot_schedule import PartReport
from psserver.durability.record_sink import StandbyLink
from psserver.peers.link_calls import MakeRequest
from psserver.process.identity import ServerIdentity
from psserver.process.worker_exits import WorkerExits
from psserver.shard.engine import REPORT_INTERVAL_SECONDS, ShardEngine

PROCESS_CHECK_INTERVAL_SECONDS = 0.2
"""Seconds between checks of worker processes on this host that shard 0 cannot see."""


class ShardMessages:
    """Makes the messages of one shard. All methods may be called from any thread.

    standby: the link to this shard's standby.
    wakeup: set when there is something to send.
    clock_offset: of this process's clock to that of shard 0.
    """

    def __init__(
        self,
        identity: ServerIdentity,
        engine: ShardEngine,
        standby: StandbyLink,
    ) -> None:
        self.wakeup, self.clock_offset = threading.Event(), OffsetEstimate()
        self._identity, self._engine, self._standby = identity, engine, standby
        self._statistics_at, self._standby_state = 0.0, ""
        self._optimizer_digest = digest_of_user_defined()
        self._outbox: deque[pb.LinkShardRequest] = deque()  # of the current connection
        self._outbox_lock = threading.Lock()
        self._last_part: pb.LinkShardRequest | None = None
        self._exits = WorkerExits()
        self._worker_processes: dict[int, str] = {}

    def begin(self, is_open: Callable[[], bool], sends_news: bool = False) -> Iterator[MakeRequest]:
        """Begin a connection: yield a report now, at every change and every interval.

        Another connection ends this one: gRPC may read on for a moment after its call has ended,
        and must not take the messages of the next one.

        is_open: Returns whether the connection is to go on.
        sends_news: Identify this shard only every interval.
        """
        with self._outbox_lock:
            # the last part may have been lost on its way: it is sent again
            last = [self._last_part] if self._last_part is not None else []
            others = (message for message in self._outbox if message is not self._last_part)
            outbox = self._outbox = deque([*others, *last])
        self._statistics_at = 0.0
        return self._requests(outbox, is_open, sends_news)

    def send(self, request: pb.LinkShardRequest) -> None:
        """Send a message soon."""
        with self._outbox_lock:
            self._outbox.append(request)
        self.wakeup.set()

    def send_part(self, part: PartReport) -> None:
        """Send the report on a part of a snapshot, again after a lost connection."""
        message = pb.SnapshotPart(
            version=part.version,
            index=part.cut,
            file=part.file,
            nbytes=part.nbytes,
            sha256=part.sha256,
            problem=part.problem,
        )
        self._last_part = pb.LinkShardRequest(snapshot_part=message)
        self.send(self._last_part)

    def forget_part(self) -> None:
        """Do not send the last part again: it belongs to a log that has ended."""
        self._last_part = None

    def watch_workers(self, processes: Mapping[int, str]) -> None:
        """Report when processes of workers end that shard 0 cannot see."""
        self._worker_processes = dict(processes)
        for worker, process in self._worker_processes.items():
            self._exits.learn(worker, process)

    def make_news(self) -> pb.LinkShardRequest:
        """Return a report of what has changed."""
        report = report_to_proto(self._engine.make_report(only_new=True))
        return pb.LinkShardRequest(report=report, ended=self._exits.among(self._worker_processes))

    def _requests(
        self, outbox: deque[pb.LinkShardRequest], is_open: Callable[[], bool], sends_news: bool
    ) -> Iterator[MakeRequest]:
        while is_open() and outbox is self._outbox:
            self.wakeup.clear()
            while outbox:
                yield partial(self._identify, outbox.popleft())
            yield partial(self._make_report, sends_news)
            self.wakeup.wait(
                PROCESS_CHECK_INTERVAL_SECONDS
                if self._worker_processes
                else REPORT_INTERVAL_SECONDS
            )

    def _make_report(self, sends_news: bool) -> pb.LinkShardRequest:
        """Return a report, with statistics if they are due."""
        # a change of the standby's state is reported at once
        if (
            time.monotonic() - self._statistics_at < REPORT_INTERVAL_SECONDS
            and self._standby_state == self._standby.state
        ):
            news = self.make_news()
            return news if sends_news else self._identify(news)
        self._statistics_at, self._standby_state = time.monotonic(), self._standby.state
        request = pb.LinkShardRequest(
            stats_json=json.dumps(statistics(self._engine, self._standby)),
            report=report_to_proto(self._engine.make_report()),
            ended=self._exits.among(self._worker_processes),
        )
        request.alive.update(self._engine.traffic.statistics.take_active_workers())
        if server_spans.is_on:
            request.spans = encode_spans(*server_spans.take(), self.clock_offset.best)
        request.clock = time.monotonic()
        return self._identify(request)

    def _identify(self, request: pb.LinkShardRequest) -> pb.LinkShardRequest:
        identity = self._identity
        request.shard, request.shards, request.address = (
            identity.shard,
            identity.shards,
            identity.address,
        )
        request.instance, request.job = identity.instance, identity.only_job
        request.optimizers = self._optimizer_digest
        request.format = spoken_format()
        request.term, request.standby, request.place = (
            self._standby.term,
            self._standby.address,
            pid_namespace(),
        )
        return request


def statistics(engine: ShardEngine, standby_link: StandbyLink | None = None) -> dict[str, Any]:
    """Return what a shard reports about itself. standby_link: None if it can have no standby."""
    store, traffic = engine.live.store, engine.traffic.statistics
    standby = {}
    if standby_link is not None:
        standby = {
            "standby": standby_link.address,
            "standby_state": standby_link.state,
            "standby_behind": standby_link.unacknowledged,
        }
    return {
        **standby,
        "version": engine.live.version,
        "parameter_bytes": store.nbytes if store else 0,
        "state_bytes": store.state_nbytes if store else 0,
        "received_bytes": traffic.received_bytes,
        "sent_bytes": traffic.sent_bytes,
        "apply_seconds": round(traffic.apply_seconds, 6),
        "phase_seconds": {
            phase: round(value, 3) for phase, value in server_spans.phase_seconds.items()
        },
        "duplicates": traffic.duplicate_count,
        "pid": os.getpid(),
    }
