"""A script that runs for `ps-ctl suggest batch`: another batch size, a few steps, and the end.

`ps-ctl` sets TRIAL_VARIABLE for each process that it starts. `BatchTrial` measures in that process
and writes a file, which `ps-ctl` reads.
"""

import atexit
import json
import os
import resource
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple

from pscommon.core.data_loop import LoopSpec
from pscommon.core.data_stream import Spec
from pscommon.core.model_spec import OptimizerSettings

TRIAL_VARIABLE = "PS_BATCH_TRIAL"
"""Internal: a TrialOrder as JSON."""

WARM_UP_COUNT = 5
"""Steps before the first timed one: they allocate memory and choose kernels."""

MAX_ACCUMULATED_COUNT = 16
"""Batches of a step for which a training pass is made long enough."""


class TrialOrder(NamedTuple):
    """What a trial does.

    Attributes:
        file: Where the results go.
        steps: Number of timed steps.
        replaces: Batch size of the loaders that get another one; 0: all keep theirs.
        batch_size: The size that they get.
    """

    file: str
    steps: int
    replaces: int = 0
    batch_size: int = 0


class TrialResult(NamedTuple):
    """What a trial has found so far.

    Attributes:
        batch_sizes: Batch sizes of the training passes, in the order of the first pass of each;
            0: a batch sampler decides.
        length: Number of samples in the data set of the first pass; None: a stream.
        optimizers: Of each optimizer the name, the kind, and the learning rates of its groups.
        device: Where tensors are computed: "cpu", or the name of a GPU.
        steps: Number of steps, those before the timed ones included.
        seconds, samples: Of the timed steps.
        memory, gpu_memory: As of `psworker.core.batch_search.BatchTry`.
    """

    batch_sizes: tuple[int, ...] = ()
    length: int | None = None
    optimizers: tuple[tuple[str, str, tuple[float, ...]], ...] = ()
    device: str = ""
    steps: int = 0
    seconds: tuple[float, ...] = ()
    samples: tuple[int, ...] = ()
    memory: int | None = None
    gpu_memory: int | None = None


class BatchTrial:
    """Measures the steps of a script, of all its trainings together.

    A step is one of the optimizer whose samples count. Only time within training passes counts.
    The first training pass writes the results as it begins: they exist if memory ends later. The
    last timed step writes them, too: what the script does afterwards does not count.
    """

    def __init__(self, order: TrialOrder) -> None:
        self._order = order
        self._result = TrialResult()
        self._since = 0.0

    @property
    def is_complete(self) -> bool:
        return len(self._result.seconds) == self._order.steps

    def batch_size(self, own: Any) -> Any:
        """Return the batch size to use instead of a loader's own one."""
        order = self._order
        return order.batch_size if order.replaces and own == order.replaces else own

    def repeats(self, batch_size: Any, length: int) -> int:
        """Return how often a training pass repeats, so that a short one does not end the trial.

        Args:
            batch_size: Samples in a batch, which may be no valid number.
            length: Number of samples in the data set.
        """
        if not isinstance(batch_size, Integral) or min(int(batch_size), length) < 1:
            return 1
        batches = MAX_ACCUMULATED_COUNT * (WARM_UP_COUNT + self._order.steps)
        return -(-batches // max(1, length // int(batch_size)))

    def begin_pass(self, spec: Spec, optimizers: Mapping[str, OptimizerSettings]) -> None:
        """Record that a training pass begins."""
        result, is_first = self._result, not self._result.batch_sizes
        has_sampler = isinstance(spec, LoopSpec) and spec.batches > 0
        size = 0 if has_sampler else spec.batch_size
        if size not in result.batch_sizes:
            self._result = result._replace(batch_sizes=(*result.batch_sizes, size))
        if is_first:
            self._result = self._result._replace(
                length=spec.size if isinstance(spec, LoopSpec) else None,
                optimizers=tuple(
                    (name, each.name, _learning_rates(each)) for name, each in optimizers.items()
                ),
            )
            self.write()
        self._since = time.perf_counter()

    def finish_step(self, samples: int) -> bool:
        """Count a step; return whether the trial is complete.

        samples: Of all its batches; 0: it is no step of the optimizer whose samples count.
        """
        result, now = self._result, time.perf_counter()
        if samples and not self.is_complete:
            self._result = result = result._replace(steps=result.steps + 1)
            if result.steps > WARM_UP_COUNT:
                self._result = result._replace(
                    seconds=(*result.seconds, now - self._since),
                    samples=(*result.samples, samples),
                )
            self._since = now
            if self.is_complete:
                self.write()
        return self.is_complete

    def end(self) -> None:
        """Write the results, unless the last timed step has."""
        if not self.is_complete:
            self.write()

    def write(self) -> None:
        """Replace the file by the results so far."""
        torch: Any = sys.modules.get("torch")
        device, gpu_memory = "cpu", None
        if torch is not None and torch.cuda.is_initialized():
            gpus = range(torch.cuda.device_count())
            gpu_memory = sum(map(torch.cuda.max_memory_allocated, gpus))
            device = torch.cuda.get_device_name()
        result = self._result._replace(
            device=device if gpu_memory else "cpu",
            memory=_peak_memory(),
            gpu_memory=gpu_memory or None,
        )
        written = Path(f"{self._order.file}.part")
        written.write_text(json.dumps(result._asdict()))
        written.replace(self._order.file)


def _learning_rates(settings: OptimizerSettings) -> tuple[float, ...]:
    rates = (group.get("lr") for group in settings.groups)
    return tuple(float(rate) for rate in rates if isinstance(rate, int | float))


@cache
def trial_of_process() -> BatchTrial | None:
    """Return the trial that this process was started for, if it was; its end writes the results."""
    order = os.environ.get(TRIAL_VARIABLE)
    if order is None:
        return None
    with suppress(OSError):  # where memory ends, the kernel ends this process, and no other
        Path("/proc/self/oom_score_adj").write_text("1000")
    trial = BatchTrial(TrialOrder(**json.loads(order)))
    atexit.register(trial.end)
    return trial


def _peak_memory() -> int:
    """Return the largest resident memory of this process, in bytes.

    On Linux getrusage would give that of the parent if it was larger.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
