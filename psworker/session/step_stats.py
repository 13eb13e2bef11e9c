"""The time of training steps by phase."""

import time
from collections.abc import Mapping

from pscommon.tracing.recorder import worker_spans
from psworker.core.results import StepProgress

PHASES = ("data", "pull", "compute", "push", "wait", "apply")

RECORDED_PHASES = ("data", "compute")
"""Phases that are spans as well. A push has finer ones."""


class StepStats:
    """Seconds by phase, and counts of steps.

    The phases are: data, waiting for the data loader; compute, the script's own work; push,
    gathering and sending the gradient; wait, for other workers or for a batch; apply, the servers'
    optimizer; pull, receiving weights.

    Attributes:
        last, total: Seconds of the last step, and of all steps, by phase.
        steps, samples: Number of finished steps, and their samples.
        stale: Steps that the policy found too old.
        rejected: Steps that a server rejected.
        phase: The current phase; empty before the first.
    """

    def __init__(self) -> None:
        self.steps = self.samples = self.stale = self.rejected = self._last_samples = 0
        self.last, self.total, self._current = (dict.fromkeys(PHASES, 0.0) for _ in range(3))
        self.phase, self._since = "", 0.0  # the clock starts with the first phase

    def enter(self, phase: str) -> None:
        """Begin a phase: time counts for it from here on."""
        now = time.monotonic()
        if self.phase:
            self._current[self.phase] += now - self._since
            if worker_spans.is_on and self.phase in RECORDED_PHASES:
                worker_spans.add_of_step(self.phase, self._since)
        self.phase, self._since = phase, now

    def finish_step(self, samples: int, exchange: Mapping[str, float]) -> None:
        """Count a step. exchange: Seconds of the push that belong to other phases than "push"."""
        self.enter("compute")
        for phase in ("wait", "apply", "pull"):
            seconds = min(exchange.get(phase, 0.0), self._current["push"])
            self._current["push"] -= seconds
            self._current[phase] += seconds
        for phase, seconds in self._current.items():
            self.total[phase] += seconds
        self.last, self._current = self._current, dict.fromkeys(PHASES, 0.0)
        self.steps += 1
        worker_spans.finish_step()
        self.samples, self._last_samples = self.samples + samples, samples

    def progress(self) -> StepProgress:
        """Return what the status shows of these steps."""
        phase = "idle" if self.phase == "wait" else self.phase
        return StepProgress(
            self.steps, self.step_seconds, self.samples_per_second, phase, self.total
        )

    @property
    def step_seconds(self) -> float:
        """Duration of the last step; 0 before the first."""
        return sum(self.last.values())

    @property
    def samples_per_second(self) -> float:
        """Samples per second of the last step."""
        return self._last_samples / self.step_seconds if self.step_seconds else 0.0
