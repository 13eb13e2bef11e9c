"""File descriptors, threads and memory of processes, which must not grow."""

import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

WARM_UP = 10.0
"""Seconds of imports and growing pools that are left out."""

LEAST = 30.0
"""Seconds after the warm-up that a process needs for a comparison."""


class Sample(NamedTuple):
    time: float
    files: int
    threads: int
    rss: int


class Growth(NamedTuple):
    """Means of a process in the first and last third of its time, and its age in seconds."""

    name: str
    seconds: float
    first: Sample
    last: Sample

    @property
    def excess(self) -> str:
        """What has grown beyond random variation; empty if nothing."""
        allowed = Sample(0.0, 8, 16, max(32 << 20, self.first.rss // 5))
        names = ("files", "threads", "rss")
        growth_by_name = {
            name: getattr(self.last, name) - getattr(self.first, name) for name in names
        }
        return ", ".join(
            f"{name} by {growth_by_name[name]}"
            for name in names
            if growth_by_name[name] > getattr(allowed, name)
        )


class Gauges:
    """Samples by name and PID."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, int], list[Sample]] = defaultdict(list)

    def take(self, name: str, pid: int) -> None:
        """Sample a process, unless it has exited."""
        with suppress(OSError, KeyError, IndexError):
            self._samples[name, pid].append(sample(pid))

    def growth(self) -> list[Growth]:
        """Return the growth of every process that ran long enough."""
        found = [_growth(name, samples) for (name, _), samples in self._samples.items()]
        return [growth for growth in found if growth is not None]


def sample(pid: int) -> Sample:
    """Of a process now. OSError or KeyError if it is gone or going."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    files = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    return Sample(
        time.monotonic(), files, int(status["Threads"]), int(status["VmRSS"].split()[0]) << 10
    )


def _growth(name: str, samples: Sequence[Sample]) -> Growth | None:
    warm = [sample for sample in samples if sample.time >= samples[0].time + WARM_UP]
    if not warm or warm[-1].time - warm[0].time < LEAST:
        return None
    third = max(1, len(warm) // 3)
    return Growth(name, warm[-1].time - samples[0].time, _mean(warm[:third]), _mean(warm[-third:]))


def _mean(samples: Sequence[Sample]) -> Sample:
    time, files, threads, rss = (fmean(values) for values in zip(*samples, strict=True))
    return Sample(time, round(files), round(threads), round(rss))
