"""The Prometheus metrics of one shard; dashboards and alerts depend on the names (deploy/)."""

import math
import platform
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.core import CounterMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from pscommon.system.imports import installed
from pscommon.telemetry.http import SECONDS, new_registry
from pscommon.tracing.recorder import SpanRecorder

MAX_WORKERS = 256
"""Series of a metric with the label `worker`; further workers share the label "other"."""

OTHER = "other"
OUTCOMES = ("applied", "duplicate", "stale", "rejected")
WORKER_STATES = ("joined", "active", "idle", "lost", "left", "past")
# errno names, and "incomplete": another shard's part is missing
SNAPSHOT_FAILURES = ("ENOSPC", "EDQUOT", "EIO", "EACCES", "EROFS", "incomplete", OTHER)

_VERSIONS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
_PUSHES = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256)


def standby_metrics(shard: int, version: Callable[[], int]) -> CollectorRegistry:
    """Return the metrics of a standby: its process and its version, nothing that belongs to the
    primary.
    """
    registry = new_registry()
    about = "Updates in the weights of the shard's standby"
    Gauge("ps_standby_version", about, ("shard",), registry=registry).labels(
        str(shard)
    ).set_function(version)
    return registry


class ServerMetrics:
    """All metrics of one shard in `registry`. Every method is cheap and thread-safe; every series
    has a shard label.

    Attributes:
        version: Updates in this shard's weights.
        barrier_wait: Seconds from the staging of a push to its decision.
        backup_workers: Workers that a round does not wait for under the current policy.
        standby_divergences: Standbys whose state differed from the primary's.
        standby_losses: Standbys that were silent or disconnected.
    """

    def __init__(self, registry: CollectorRegistry, *, shard: int) -> None:
        self.registry = registry
        self._shard = str(shard)
        self._create_info()
        self._create_training()
        self._create_network()
        self._create_membership()
        self._create_durability()

    def show_shard(self, about: Callable[[], Mapping[str, str]]) -> None:
        """Add ps_shard_info. Its labels beside the shard are what `about` returns at a scrape."""
        self.registry.register(_ShardInfo(lambda: {"shard": self._shard, **about()}))

    def show_goodput(self, shares: Callable[[], Mapping[str, float | None]]) -> None:
        """Add ps_goodput_ratio, whose values are what `shares` returns at a scrape."""
        gauge = self._gauge("ps_goodput_ratio", "Share that counted; NaN: none yet", "of")
        for name in shares():
            value = partial(_share, shares, name)
            gauge.labels(self._shard, name).set_function(value)

    def show_phases(self, recorder: SpanRecorder) -> None:
        """Add the seconds by phase, and the steps whose spans were dropped, at a scrape."""
        self.registry.register(_Phases(self._shard, recorder))

    def set_model_size(self, parameters: int, nbytes: int) -> None:
        """Set the size of this shard's part of the model, in elements and in bytes."""
        self._parameters.set(parameters)
        self._parameter_bytes.set(nbytes)

    def count_push(self, outcome: str, staleness: int | None = None) -> None:
        """Count a decided push: one of OUTCOMES, and its staleness in versions if it has one."""
        self._outcomes[outcome].inc()
        if staleness is not None:
            self._staleness.observe(staleness)

    def record_update(self, seconds: float, contributors: int) -> None:
        """Count an update of the weights: its duration and the number of workers in it."""
        self._apply.observe(seconds)
        self._contributors.observe(contributors)

    def count_bytes(self, received: int = 0, sent: int = 0) -> None:
        """Count bytes of received gradients and of sent weights."""
        if received:
            self._received.inc(received)
        if sent:
            self._sent.inc(sent)

    def record_call(self, method: str, code: str, seconds: float) -> None:
        """Count a finished call: its short name and its canonical status code."""
        if (method, code) not in self._calls:
            self._calls[method, code] = (
                self._rpcs.labels(self._shard, method, code),
                self._rpc_seconds.labels(self._shard, method),
            )
        count, duration = self._calls[method, code]
        count.inc()
        duration.observe(seconds)

    def set_workers(self, counts: Mapping[str, int]) -> None:
        """Set the number of members by state; a missing state counts zero."""
        for state in dict.fromkeys((*WORKER_STATES, *counts)):
            self._workers.labels(self._shard, state).set(counts.get(state, 0))

    def set_workers_wanted(self, workers: int | None) -> None:
        """Set the number of workers that the job wants; without one there is no series, because
        an autoscaler would take 0 as the number.
        """
        if workers is not None:
            self._wanted.labels(self._shard).set(workers)

    def set_worker(self, worker: int | str, clock: int, has_pushed: bool) -> None:
        """Set a worker's clock. The label "other" shows the worker of the last call.

        Args:
            has_pushed: One of its pushes has counted since the last call.
        """
        with self._lock:
            label = self._label(str(worker))
            self._clock.labels(self._shard, label).set(clock)
            if has_pushed:
                self._last_push.labels(self._shard, label).set_to_current_time()
                self._with_push_time.add(label)

    def remove_worker(self, worker: int | str) -> None:
        """End the series of a worker that has left or is lost; ignore an unknown worker."""
        with self._lock:
            self._forget(str(worker))

    def record_snapshot(self, seconds: float, nbytes: int) -> None:
        """Record that this shard's part of a snapshot is complete on disk; its age counts from
        now.
        """
        self._snapshot_seconds.observe(seconds)
        self._snapshot_bytes.set(nbytes)
        self._snapshot_success.set_to_current_time()

    def set_restored_snapshot(self, at: float, nbytes: int) -> None:
        """Set the time and size of the snapshot that this shard continues from; 0: none."""
        self._snapshot_bytes.set(nbytes)
        self._snapshot_success.set(at)

    def count_snapshot_failure(self, reason: str) -> None:
        """Count a failed snapshot: one of SNAPSHOT_FAILURES (an errno's name), or "other"."""
        known = reason if reason in SNAPSHOT_FAILURES else OTHER
        self._snapshot_failures.labels(self._shard, known).inc()

    def count_log_failure(self, reason: str) -> None:
        """Count a failed write to the log; reason as for `count_snapshot_failure`."""
        known = reason if reason in SNAPSHOT_FAILURES else OTHER
        self._log_failures.labels(self._shard, known).inc()

    def count_lost_updates(self, count: int) -> None:
        """Count the updates that a rollback to a snapshot lost."""
        if count:
            self._lost.inc(count)
            self._last_loss_time.set_to_current_time()

    def set_standby(self, in_sync: bool, behind: int) -> None:
        """Set whether a standby could take over, and the number of records in flight to it."""
        self._standby_in_sync.set(in_sync)
        self._standby_behind.set(behind)

    def _label(self, worker: str) -> str:
        if worker in self._known:
            return worker
        if len(self._known) == MAX_WORKERS:
            self._others.add(worker)
            return OTHER
        self._forget(worker)  # until now it may share the label "other"
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
        if label in self._with_push_time:
            self._with_push_time.remove(label)
            self._last_push.remove(self._shard, label)

    # the metrics themselves, by dashboard row

    def _create_info(self) -> None:
        about = {name: installed(name) for name in ("torch", "grpcio", "protobuf")}
        build = Info(
            "ps_build", "Versions of this server and its libraries", registry=self.registry
        )
        build.info(
            {"version": installed("paramserver"), "python": platform.python_version(), **about}
        )

    def _create_training(self) -> None:
        self.version = self._gauge("ps_version", "Updates in this shard's weights")
        self._parameters = self._gauge("ps_parameters", "Elements of the model on this shard")
        self._parameter_bytes = self._gauge(
            "ps_parameter_bytes", "Bytes of the model on this shard"
        )
        self._apply = self._histogram(
            "ps_push_apply_seconds", "Optimizer's time for one update", SECONDS
        )
        self._contributors = self._histogram("ps_apply_pushes", "Pushes in one update", _PUSHES)
        self.barrier_wait = self._histogram(
            "ps_barrier_wait_seconds", "Time a push was staged until decided", SECONDS
        )
        self._staleness = self._histogram(
            "ps_staleness_versions", "Updates between a push and its weights", _VERSIONS
        )
        self._pushes = self._counter("ps_pushes_total", "Pushes by outcome", "outcome")
        # from zero, so that a rate includes the first event
        self._outcomes = {
            outcome: self._pushes.labels(self._shard, outcome) for outcome in OUTCOMES
        }

    def _create_network(self) -> None:
        self._received = self._counter("ps_bytes_received_total", "Bytes of pushes")
        self._sent = self._counter("ps_bytes_sent_total", "Bytes of pulls")
        self._rpcs = self._counter("ps_rpc_requests_total", "Finished calls", "method", "code")
        self._calls: dict[
            tuple[str, str], tuple[Counter, Histogram]
        ] = {}  # looking up a series costs more than counting
        labels = ("shard", "method")
        self._rpc_seconds = Histogram(
            "ps_rpc_duration_seconds",
            "Duration of calls, including waits",
            labels,
            buckets=SECONDS,
            registry=self.registry,
        )

    def _create_membership(self) -> None:
        self._workers = self._gauge("ps_workers", "Workers by state", "state")
        self._wanted = Gauge(
            "ps_workers_wanted", "Workers that the job wants", ("shard",), registry=self.registry
        )
        self.backup_workers = self._gauge(
            "ps_backup_workers", "Workers that a round need not wait for"
        )
        self._clock = self._gauge("ps_worker_clock", "Steps that a worker has finished", "worker")
        self._last_push = self._gauge(
            "ps_worker_last_push_timestamp_seconds", "Time of the last applied push", "worker"
        )
        self._with_push_time: set[str] = set()  # labels with a time of the last push
        self._lock = threading.Lock()  # guards the sets and their series
        self._known: set[str] = set()
        self._others: set[str] = set()

    def _create_durability(self) -> None:
        self._snapshot_seconds = self._histogram(
            "ps_snapshot_duration_seconds", "Time to write one part", SECONDS
        )
        self._snapshot_bytes = self._gauge("ps_snapshot_bytes", "Bytes of the newest part")
        name = "ps_snapshot_last_success_timestamp_seconds"
        self._snapshot_success = self._gauge(name, "Time of the newest complete part; 0: none")
        self._snapshot_failures = self._counter(
            "ps_snapshot_failures_total", "Failed snapshots", "reason"
        )
        self._log_failures = self._counter(
            "ps_log_failures_total", "Failed writes to the log", "reason"
        )
        for failures in (self._snapshot_failures, self._log_failures):
            for reason in SNAPSHOT_FAILURES:
                failures.labels(self._shard, reason)
        self._lost = self._counter("ps_updates_lost_total", "Updates lost by rollbacks")
        # an equal counter in a restarted process, or in a standby, shows no increase
        self._last_loss_time = self._gauge(
            "ps_updates_lost_timestamp_seconds", "Time of the last lost updates; 0: never"
        )
        self._standby_in_sync = self._gauge("ps_standby_in_sync", "1: a standby could take over")
        self._standby_behind = self._gauge(
            "ps_standby_behind_records", "Records that the standby does not have yet"
        )
        self.standby_divergences = self._counter(
            "ps_standby_divergences_total", "Standby checksum mismatches"
        )
        self.standby_losses = self._counter("ps_standby_losses_total", "Lost standbys")

    def _gauge(self, name: str, about: str, *labels: str) -> Gauge:
        """Return the gauge; without further labels the series of this shard."""
        gauge = Gauge(name, about, ("shard", *labels), registry=self.registry)
        return gauge if labels else gauge.labels(self._shard)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        """Return the counter; without further labels the series of this shard."""
        counter = Counter(name, about, ("shard", *labels), registry=self.registry)
        return counter if labels else counter.labels(self._shard)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, about, ("shard",), buckets=buckets, registry=self.registry)
        return histogram.labels(self._shard)


def _share(shares: Callable[[], Mapping[str, float | None]], name: str) -> float:
    share = shares()[name]
    return math.nan if share is None else share


class _ShardInfo(Collector):
    """ps_shard_info with its current labels."""

    def __init__(self, labels: Callable[[], Mapping[str, str]]) -> None:
        self._labels = labels

    def collect(self) -> Iterator[InfoMetricFamily]:
        yield InfoMetricFamily(
            "ps_shard", "Shard and job of this server", value=dict(self._labels())
        )


class _Phases(Collector):
    """What a recorder has measured so far."""

    def __init__(self, shard: str, recorder: SpanRecorder) -> None:
        self._shard, self._recorder = shard, recorder

    def collect(self) -> Iterator[CounterMetricFamily]:
        about = "Time of the shard's work by phase"
        seconds = CounterMetricFamily("ps_shard_phase_seconds", about, labels=("shard", "phase"))
        for phase, value in self._recorder.phase_seconds.items():
            seconds.add_metric((self._shard, phase), value)
        yield seconds
        about = "Steps whose spans did not fit into a message while they were recorded"
        dropped = CounterMetricFamily("ps_trace_steps_dropped", about, labels=("shard",))
        dropped.add_metric((self._shard,), self._recorder.dropped_steps)
        yield dropped
