"""What a worker process counts for Prometheus: where the time of a step goes, and what the
script reports.

The functions cost nothing until somebody has called `serve`: the training loop calls them in any
case.
"""

import threading
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pscommon.telemetry.http import SECONDS, MetricsServer, new_registry

PHASES = ("data", "pull", "compute", "push", "wait")
MAX_REPORTED = (
    64  # names of reported values; the script may invent more, Prometheus does not get them
)


class WorkerMetrics:
    """All metrics of one worker in `registry`."""

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
        self._in_job = Gauge(
            "ps_worker_in_job", "1: this worker has a place in a job", registry=registry
        )
        self._loss = Gauge(
            "ps_worker_loss", "The loss that the script reported last", registry=registry
        )
        self._loss.set(float("nan"))  # until it reports one: 0 would look like a perfect model
        self._reported = Gauge(
            "ps_worker_reported",
            "Values that the script reported last",
            ("name",),
            registry=registry,
        )
        self._names: set[str] = set()

    def in_job(self, is_in: bool) -> None:
        """Has this worker a place in a job, whether or not its servers answer?"""
        self._in_job.set(is_in)

    def step(self, phases: Mapping[str, float], samples: int) -> None:
        """One finished step: seconds by phase (of PHASES), and its number of samples."""
        for phase, seconds in phases.items():
            self._phases.labels(phase).observe(seconds)
        self._steps.inc()
        self._samples.inc(samples)

    def reported(self, name: str, value: float) -> None:
        """A value of the script's own; the one called "loss" is also ps_worker_loss."""
        if name == "loss":
            self._loss.set(value)
        if name in self._names or len(self._names) < MAX_REPORTED:
            self._names.add(name)
            self._reported.labels(name).set(value)


class _Serving:
    """This process's metrics while they are served."""

    def __init__(self, bind: str) -> None:
        registry = new_registry()
        self.metrics = WorkerMetrics(registry)
        # a worker that runs is ready: nobody sends it requests
        self.monitor = MetricsServer(bind, registry, lambda: (True, "running"))


_serving: _Serving | None = None
_lock = threading.Lock()


def serve(bind: str) -> str:
    """Serves this process's metrics on HOST:PORT (port 0: a free one) and returns the address
    that is bound.

    Once per process: a later call changes nothing and returns the address of the first. Errors
    are Monitor's.
    """
    global _serving
    with _lock:
        if _serving is None:
            _serving = _Serving(bind)
        return _serving.monitor.address


def close() -> None:
    """Frees the port and forgets what was counted; harmless when nobody serves."""
    global _serving
    with _lock:
        serving, _serving = _serving, None
    if serving is not None:
        serving.monitor.close()


def in_job(is_in: bool) -> None:
    """WorkerMetrics.in_job, where anybody serves."""
    if _serving is not None:
        _serving.metrics.in_job(is_in)


def step(phases: Mapping[str, float], samples: int) -> None:
    """WorkerMetrics.step, where anybody serves."""
    if _serving is not None:
        _serving.metrics.step(phases, samples)


def reported(name: str, value: float) -> None:
    """WorkerMetrics.reported, where anybody serves."""
    if _serving is not None:
        _serving.metrics.reported(name, value)
