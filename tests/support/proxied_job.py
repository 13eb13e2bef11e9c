"""A forked job whose servers are reached through proxies: by workers through one for each shard,
by the other shards through one of their own."""

import re
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.forked_job import ForkedJob, Life, Script
from tests.support.machine_time import machine_seconds
from tests.support.metrics_scrape import Metrics
from tests.support.ports import free_ports
from tests.support.proxy import Proxy
from tests.support.workers import until

STAMP = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\.\d+")


class ProxiedJob(ForkedJob):
    """proxies: by shard, for workers; link: from the other shards to shard 0."""

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
        self.link = Proxy(self._binds[0], seed=seed + shards)
        self._monitors = [f"127.0.0.1:{port}" for port in free_ports(shards)]
        self._open = ExitStack()

    def __enter__(self) -> Self:
        for proxy in self.everywhere:
            self._open.enter_context(proxy)
        return super().__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        self._open.close()

    @property
    def everywhere(self) -> list[Proxy]:
        return [*self.proxies, self.link]

    @property
    def address(self) -> str:
        return ",".join(proxy.address for proxy in self.proxies)

    def metrics(self, shard: int) -> Metrics:
        """Whatever the proxies do."""
        return Metrics(self._monitors[shard])

    def _server(self, shard: int) -> list[str]:
        arguments = super()._server(shard)
        if shard:
            arguments[arguments.index("--join") + 1] = self.link.address
        return [
            *arguments,
            "--advertise",
            self.proxies[shard].address,
            "--metrics-bind",
            self._monitors[shard],
        ]


def lines(life: Life, text: str) -> list[str]:
    """What it has said so far that has this in it."""
    return (
        [line for line in life.log.read_text().splitlines() if text in line]
        if life.log.exists()
        else []
    )


def heard(life: Life, text: str, times: int = 1, seconds: float = 30.0) -> str:
    """The line that says it for the `times`-th time, once it is there."""

    def look() -> str:
        found = lines(life, text)
        return found[times - 1] if len(found) >= times else ""

    try:
        return until(look, text, seconds)
    except AssertionError:
        said = "\n".join(lines(life, "")[-40:])
        raise AssertionError(
            f"{life.name} did not say {text!r} {times} times in {seconds:.1f} s:\n{said}"
        ) from None


def more(lives: Sequence[Life], text: str, times: int = 1, seconds: float = 30.0) -> float:
    """Seconds in which the machine ran until each of them has said it so many times more."""
    began, wanted = time.monotonic(), [len(lines(life, text)) + times for life in lives]
    for life, number in zip(lives, wanted, strict=True):
        heard(life, text, number, seconds)
    return machine_seconds(began)


def longest_silence(life: Life, text: str, since: float, to: float) -> float:
    """Seconds without a line that has this in it, between two times of time.time()."""
    stamps = [match[0] for line in lines(life, text) if (match := STAMP.search(line))]
    times = [datetime.fromisoformat(f"{stamp}+00:00").timestamp() for stamp in stamps]
    marks = [since, *(moment for moment in times if since < moment < to), to]
    return max(after - before for before, after in pairwise(marks))
