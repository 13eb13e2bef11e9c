"""A forked job with a proxy before each shard for workers, and one before shard 0 for other
shards.
"""

import re
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.forked_job import ForkedJob, JobProcess, Script
from tests.support.machine_time import machine_seconds
from tests.support.metrics_scrape import Metrics
from tests.support.ports import free_ports
from tests.support.proxy import Proxy, advertised
from tests.support.workers import until

STAMP = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\.\d+")


class ProxiedJob(ForkedJob):
    """A ForkedJob behind proxies.

    proxies: proxy of each shard for workers.
    stream_proxies: proxy of each shard's stream port.
    link: proxy of shard 0 for the other shards.
    """

    def __init__(
        self,
        folder: Path,
        shards: int,
        flags: Sequence[object],
        script: Script,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(folder, shards, flags, script, **options)
        self.proxies = [Proxy(bind, seed=seed + shard) for shard, bind in enumerate(self._binds)]
        self._stream_binds = [f"127.0.0.1:{port}" for port in free_ports(shards)]
        self.stream_proxies = [
            Proxy(bind, seed=seed + 100 + shard) for shard, bind in enumerate(self._stream_binds)
        ]
        self.link = Proxy(self._binds[0], seed=seed + shards)
        self._monitors = [f"127.0.0.1:{port}" for port in free_ports(shards)]
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        for proxy in self.all_proxies:
            self._resources.enter_context(proxy)
        return super().__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        self._resources.close()

    @property
    def all_proxies(self) -> list[Proxy]:
        return [*self.proxies, *self.stream_proxies, self.link]

    @property
    def address(self) -> str:
        return ",".join(proxy.address for proxy in self.proxies)

    def metrics(self, shard: int) -> Metrics:
        """Scrape a shard directly, not through a proxy."""
        return Metrics(self._monitors[shard])

    def _server(self, shard: int) -> list[str]:
        arguments = super()._server(shard)
        if shard:
            arguments[arguments.index("--join") + 1] = self.link.address
        return [
            *arguments,
            *advertised(self.proxies[shard], self._stream_binds[shard], self.stream_proxies[shard]),
            "--metrics-bind",
            self._monitors[shard],
        ]


def lines(process: JobProcess, text: str) -> list[str]:
    """Return the log lines so far that contain the text."""
    return (
        [line for line in process.log.read_text().splitlines() if text in line]
        if process.log.exists()
        else []
    )


def wait_for_line(process: JobProcess, text: str, times: int = 1, seconds: float = 30.0) -> str:
    """Wait for the `times`-th log line that contains the text; return it."""

    def find_line() -> str:
        found = lines(process, text)
        return found[times - 1] if len(found) >= times else ""

    try:
        return until(find_line, text, seconds)
    except AssertionError:
        newest_lines = "\n".join(lines(process, "")[-40:])
        raise AssertionError(
            f"{process.name} did not log {text!r} {times} times in {seconds:.1f} s:\n{newest_lines}"
        ) from None


def wait_for_more_lines(
    processes: Sequence[JobProcess], text: str, times: int = 1, seconds: float = 30.0
) -> float:
    """Wait until each process has logged the text `times` more times; return the seconds without
    pauses of the machine.
    """
    began, wanted = time.monotonic(), [len(lines(process, text)) + times for process in processes]
    for process, number in zip(processes, wanted, strict=True):
        wait_for_line(process, text, number, seconds)
    return machine_seconds(began)


def longest_silence(process: JobProcess, text: str, since: float, to: float) -> float:
    """Return the longest time without a line that contains the text, between two wall-clock
    times.
    """
    stamps = [match[0] for line in lines(process, text) if (match := STAMP.search(line))]
    times = [datetime.fromisoformat(f"{stamp}+00:00").timestamp() for stamp in stamps]
    marks = [since, *(moment for moment in times if since < moment < to), to]
    return max(after - before for before, after in pairwise(marks))
