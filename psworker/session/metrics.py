"""Prometheus metrics of a worker process: time of steps by phase, and reported values.

The training loop always calls the functions; before `serve` they do nothing.
"""

import threading
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pscommon.telemetry.http import SECONDS, MetricsServer, new_registry
from psworker.session.step_stats import PHASES

# Largest number of names of reported values for Prometheus; further names are left out.
MAX_REPORTED_NAMES = 64


class WorkerMetrics:
    """All metrics of one worker in `registry`.

    Attributes:
        in_job: 1 while the worker has a membership, even if the servers do not answer.
        trace_steps_dropped: Steps that are missing in a trace.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._phases = Histogram(
            "ps_worker_phase_seconds",
            "Time of one step by phase",
            ("phase",),
            buckets=SECONDS,
            registry=registry,
        )
        for phase in PHASES:
            self._phases.labels(phase)
        self._steps = Counter(
            "ps_worker_steps_total", "Steps that this worker has finished", registry=registry
        )
        self._samples = Counter(
            "ps_worker_samples_total", "Samples that this worker has used", registry=registry
        )
        self.in_job = Gauge(
            "ps_worker_in_job", "1: this worker has a place in a job", registry=registry
        )
        self._loss = Gauge(
            "ps_worker_loss", "The loss that the script reported last", registry=registry
        )
        self._loss.set(float("nan"))  # before the first report: 0 would look like a perfect model
        self._reported = Gauge(
            "ps_worker_reported",
            "Values that the script reported last",
            ("name",),
            registry=registry,
        )
        self.trace_steps_dropped = Counter(
            "ps_worker_trace_steps_dropped_total",
            "Steps whose spans did not fit into a message while they were recorded",
            registry=registry,
        )
        self._names: set[str] = set()

    def step(self, phases: Mapping[str, float], samples: int) -> None:
        """Record a finished step.

        phases: Seconds by phase.
        samples: Number of samples of the step.
        """
        for phase, seconds in phases.items():
            self._phases.labels(phase).observe(seconds)
        self._steps.inc()
        self._samples.inc(samples)

    def reported(self, name: str, value: float) -> None:
        """Record a reported value; the one with the name "loss" also sets ps_worker_loss."""
        if name == "loss":
            self._loss.set(value)
        if name in self._names or len(self._names) < MAX_REPORTED_NAMES:
            self._names.add(name)
            self._reported.labels(name).set(value)


_serving: tuple[WorkerMetrics, MetricsServer] | None = None
_lock = threading.Lock()


def serve(bind: str) -> str:
    """Serve this process's metrics, and return the bound address.

    A later call changes nothing and returns the address of the first. Raises the errors of
    listen_http.

    bind: HOST:PORT; port 0 selects a free port.
    """
    global _serving
    with _lock:
        if _serving is None:
            from pscommon.wire.metrics_port import serve_metrics  # gRPC: not for every import

            registry = new_registry()
            # A running worker is always ready, because it serves no requests.
            server = serve_metrics(bind, registry, lambda: (True, "running"))
            _serving = WorkerMetrics(registry), server
        return _serving[1].address


def close() -> None:
    """Free the port and discard the metrics; does nothing if they are not served."""
    global _serving
    with _lock:
        serving, _serving = _serving, None
    if serving is not None:
        serving[1].close()


def in_job(is_in: bool) -> None:
    """Set WorkerMetrics.in_job if the metrics are served."""
    if _serving is not None:
        _serving[0].in_job.set(is_in)


def trace_steps_dropped(count: int) -> None:
    """Count steps that are missing in a trace if the metrics are served."""
    if _serving is not None:
        _serving[0].trace_steps_dropped.inc(count)


def step(phases: Mapping[str, float], samples: int) -> None:
    """Call WorkerMetrics.step if the metrics are served."""
    if _serving is not None:
        _serving[0].step(phases, samples)


def reported(name: str, value: float) -> None:
    """Call WorkerMetrics.reported if the metrics are served."""
    if _serving is not None:
        _serving[0].reported(name, value)
