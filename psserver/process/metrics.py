"""What one shard counts for Prometheus; the names are promised to dashboards and alerts
(deploy/).
"""

import platform
import threading
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.core import InfoMetricFamily
from prometheus_client.registry import Collector

from pscommon.system.packages import installed
from pscommon.telemetry.http import SECONDS, new_registry

MAX_WORKERS = 256  # series per worker-labelled metric; whoever comes after shares the label "other"
OTHER = "other"
OUTCOMES = ("applied", "duplicate", "stale", "rejected")
WORKER_STATES = ("joined", "active", "idle", "lost", "left", "past")
# errno names, and "incomplete": another shard's part did not come
SNAPSHOT_FAILURES = ("ENOSPC", "EDQUOT", "EIO", "EACCES", "EROFS", "incomplete", OTHER)

_VERSIONS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
_PUSHES = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256)


def standby_metrics(shard: int, version: Callable[[], int]) -> CollectorRegistry:
    """What a standby shows: its process, and how far it is; nothing that would count as the
    shard's own.
    """
    registry = new_registry()
    about = "Updates in the weights of the shard's standby"
    Gauge("ps_standby_version", about, ("shard",), registry=registry).labels(
        str(shard)
    ).set_function(version)
    return registry


class ServerMetrics:
    """All metrics of one shard in `registry`. Every method is cheap and thread-safe; every
    series has a shard label.

    about: asked with every scrape for what else ps_shard_info says of this shard.
    """

    def __init__(self, registry: CollectorRegistry, *, shard: int) -> None:
        self.about: Callable[[], Mapping[str, str]] = dict
        self._registry = registry
        self._shard = str(shard)
        self._build()
        self._training()
        self._network()
        self._membership()
        self._durability()

    def version(self, version: int) -> None:
        """Number of updates in this shard's weights."""
        self._version.set(version)

    def model(self, parameters: int, nbytes: int) -> None:
        """Size of this shard's part of the model, in numbers and in bytes."""
        self._parameters.set(parameters)
        self._parameter_bytes.set(nbytes)

    def pushed(self, outcome: str, staleness: int | None = None) -> None:
        """One push was decided: one of OUTCOMES, and its staleness in versions where it has one."""
        self._outcomes[outcome].inc()
        if staleness is not None:
            self._staleness.observe(staleness)

    def applied(self, seconds: float, contributors: int) -> None:
        """One update of the weights took `seconds` and summed the pushes of `contributors`
        workers.
        """
        self._apply.observe(seconds)
        self._contributors.observe(contributors)

    def waited(self, seconds: float) -> None:
        """One push was staged here for `seconds` until it was decided."""
        self._barrier.observe(seconds)

    def moved(self, received: int = 0, sent: int = 0) -> None:
        """Bytes of gradients that came and of weights that went."""
        if received:
            self._received.inc(received)
        if sent:
            self._sent.inc(sent)

    def rpc(self, method: str, code: str, seconds: float) -> None:
        """One call ended: its short name and its canonical status code (see
        psserver.process.rpc_metrics).
        """
        if (method, code) not in self._calls:
            self._calls[method, code] = (
                self._rpcs.labels(self._shard, method, code),
                self._rpc_seconds.labels(self._shard, method),
            )
        count, duration = self._calls[method, code]
        count.inc()
        duration.observe(seconds)

    def backup_workers(self, count: int) -> None:
        """So many a round need not wait for, under the policy of the moment."""
        self._backup.set(count)

    def workers(self, counts: Mapping[str, int]) -> None:
        """The membership by state; a state that is not named counts none."""
        for state in dict.fromkeys((*WORKER_STATES, *counts)):
            self._workers.labels(self._shard, state).set(counts.get(state, 0))

    def worker(self, worker: int | str, clock: int, pushed: bool) -> None:
        """Its clock is `clock`; pushed: one of its pushes counted just now. "other" shows
        whoever of them was last.
        """
        with self._lock:
            label = self._label(str(worker))
            self._clock.labels(self._shard, label).set(clock)
            if pushed:
                self._last_push.labels(self._shard, label).set_to_current_time()
                self._pushed.add(label)

    def gone(self, worker: int | str) -> None:
        """`worker` has left or is lost: its series end. An unknown one is ignored."""
        with self._lock:
            self._forget(str(worker))

    def snapshot(self, seconds: float, nbytes: int) -> None:
        """This shard's part of a snapshot of `nbytes` is complete on disk; its age counts from
        now.
        """
        self._snapshot_seconds.observe(seconds)
        self._snapshot_bytes.set(nbytes)
        self._snapshot_success.set_to_current_time()

    def snapshot_found(self, at: float, nbytes: int) -> None:
        """This shard goes on from a snapshot of this time, in which its part has so many bytes;
        0: it has none.
        """
        self._snapshot_bytes.set(nbytes)
        self._snapshot_success.set(at)

    def snapshot_failed(self, reason: str) -> None:
        """One of SNAPSHOT_FAILURES, such as an errno's name; any other reason counts as "other"."""
        known = reason if reason in SNAPSHOT_FAILURES else OTHER
        self._snapshot_failures.labels(self._shard, known).inc()

    def log_failed(self, reason: str) -> None:
        """The log could not be written; reason as for `snapshot_failed`."""
        known = reason if reason in SNAPSHOT_FAILURES else OTHER
        self._log_failures.labels(self._shard, known).inc()

    def updates_lost(self, count: int) -> None:
        """The job went back to a snapshot, and so many updates are gone."""
        if count:
            self._lost.inc(count)
            self._lost_at.set_to_current_time()

    def standby(self, in_sync: bool, behind: int) -> None:
        """Has this shard a standby that could take over, and how many records are on their way
        to it?
        """
        self._standby_in_sync.set(in_sync)
        self._standby_behind.set(behind)

    def standby_diverged(self) -> None:
        """The standby could not go on from what it had, because it was wrong."""
        self._standby_divergences.inc()

    def standby_lost(self) -> None:
        """It is silent, or its line is cut."""
        self._standby_losses.inc()

    def _label(self, worker: str) -> str:
        if worker in self._known:
            return worker
        if len(self._known) == MAX_WORKERS:
            self._others.add(worker)
            return OTHER
        self._forget(worker)  # it may have been among the others before there was room
        self._known.add(worker)
        return worker

    def _forget(self, worker: str) -> None:
        if worker in self._known:
            self._known.remove(worker)
            self._end_series(worker)
        elif self._others == {worker}:
            self._end_series(OTHER)
        self._others.discard(worker)

    def _end_series(self, label: str) -> None:
        self._clock.remove(self._shard, label)
        if label in self._pushed:
            self._pushed.remove(label)
            self._last_push.remove(self._shard, label)

    # the metrics themselves, by dashboard row

    def _build(self) -> None:
        about = {name: installed(name) for name in ("torch", "grpcio", "protobuf")}
        build = Info(
            "ps_build", "Versions of this server and of what it runs on", registry=self._registry
        )
        build.info(
            {"version": installed("paramserver"), "python": platform.python_version(), **about}
        )
        self._registry.register(_ShardInfo(lambda: {"shard": self._shard, **self.about()}))

    def _training(self) -> None:
        self._version = self._gauge("ps_version", "Updates in this shard's weights").labels(
            self._shard
        )
        self._parameters = self._gauge(
            "ps_parameters", "Numbers of the model on this shard"
        ).labels(self._shard)
        self._parameter_bytes = self._gauge(
            "ps_parameter_bytes", "Bytes of the model on this shard"
        ).labels(self._shard)
        self._apply = self._histogram(
            "ps_push_apply_seconds", "Optimizer's time for one update", SECONDS
        )
        self._contributors = self._histogram(
            "ps_apply_pushes", "Pushes that one update summed", _PUSHES
        )
        self._barrier = self._histogram(
            "ps_barrier_wait_seconds", "Time a push was staged until decided", SECONDS
        )
        self._staleness = self._histogram(
            "ps_staleness_versions", "Updates between a push and its weights", _VERSIONS
        )
        self._pushes = self._counter("ps_pushes_total", "Pushes by what became of them", "outcome")
        # all from zero on, so that a rate sees the first one
        self._outcomes = {
            outcome: self._pushes.labels(self._shard, outcome) for outcome in OUTCOMES
        }

    def _network(self) -> None:
        self._received = self._counter("ps_bytes_received_total", "Bytes of pushes").labels(
            self._shard
        )
        self._sent = self._counter("ps_bytes_sent_total", "Bytes of pulls").labels(self._shard)
        self._rpcs = self._counter("ps_rpc_requests_total", "Calls that ended", "method", "code")
        self._calls: dict[
            tuple[str, str], tuple[Counter, Histogram]
        ] = {}  # looking series up costs more than a count
        labels = ("shard", "method")
        self._rpc_seconds = Histogram(
            "ps_rpc_duration_seconds",
            "Calls, waits included",
            labels,
            buckets=SECONDS,
            registry=self._registry,
        )

    def _membership(self) -> None:
        self._workers = self._gauge("ps_workers", "Workers by state", "state")
        self._backup = self._gauge(
            "ps_backup_workers", "Workers that a round need not wait for"
        ).labels(self._shard)
        self._clock = self._gauge("ps_worker_clock", "Steps that a worker has finished", "worker")
        self._last_push = self._gauge(
            "ps_worker_last_push_timestamp_seconds", "When it counted", "worker"
        )
        self._pushed: set[str] = set()  # series of these have a time of the last push
        self._lock = threading.Lock()  # over the sets and the series that they name
        self._known: set[str] = set()
        self._others: set[str] = set()

    def _durability(self) -> None:
        self._snapshot_seconds = self._histogram(
            "ps_snapshot_duration_seconds", "Time to write one part", SECONDS
        )
        self._snapshot_bytes = self._gauge("ps_snapshot_bytes", "Bytes of the newest part").labels(
            self._shard
        )
        name = "ps_snapshot_last_success_timestamp_seconds"
        self._snapshot_success = self._gauge(
            name, "When the newest part was complete; 0: none yet"
        ).labels(self._shard)
        self._snapshot_failures = self._counter(
            "ps_snapshot_failures_total", "Snapshots that failed", "reason"
        )
        for reason in SNAPSHOT_FAILURES:
            self._snapshot_failures.labels(self._shard, reason)
        self._log_failures = self._counter(
            "ps_log_failures_total", "Writes to the log that failed", "reason"
        )
        for reason in SNAPSHOT_FAILURES:
            self._log_failures.labels(self._shard, reason)
        lost = self._counter(
            "ps_updates_lost_total", "Updates lost when the job went back to a snapshot"
        )
        self._lost = lost.labels(self._shard)
        # a counter of the same height in a process that was started again, or in a standby's, shows
        # no increase
        lost_at = self._gauge(
            "ps_updates_lost_timestamp_seconds", "When updates were last lost; 0: never"
        )
        self._lost_at = lost_at.labels(self._shard)
        in_sync = self._gauge("ps_standby_in_sync", "1: there is a standby that could take over")
        self._standby_in_sync = in_sync.labels(self._shard)
        behind = self._gauge(
            "ps_standby_behind_records", "Records that the standby does not have yet"
        )
        self._standby_behind = behind.labels(self._shard)
        diverged = self._counter(
            "ps_standby_divergences_total", "Standbys that were not what their primary was"
        )
        self._standby_divergences = diverged.labels(self._shard)
        losses = self._counter("ps_standby_losses_total", "Standbys that were lost")
        self._standby_losses = losses.labels(self._shard)

    def _gauge(self, name: str, about: str, *labels: str) -> Gauge:
        return Gauge(name, about, ("shard", *labels), registry=self._registry)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(name, about, ("shard", *labels), registry=self._registry)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, about, ("shard",), buckets=buckets, registry=self._registry).labels(
            self._shard
        )


class _ShardInfo(Collector):
    """ps_shard_info, as it is at the moment."""

    def __init__(self, labels: Callable[[], Mapping[str, str]]) -> None:
        self._labels = labels

    def collect(self) -> Iterator[InfoMetricFamily]:
        yield InfoMetricFamily(
            "ps_shard", "Which shard of which job this is", value=dict(self._labels())
        )
