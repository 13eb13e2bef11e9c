"""One act of the soak: a job runs for a while, undisturbed or not, ends, and is judged."""

import json
import threading
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from pscommon.core.errors import PSError
from psworker import Client
from tests.chaos import checker, journal
from tests.chaos.checker import Evidence, Finding, Rollback
from tests.chaos.cluster import Act, Cluster, Mending
from tests.chaos.gauges import Growth
from tests.chaos.journal import Operation
from tests.chaos.schedule import Fault
from tests.support.programs import Program

TICK, MEASURE = 0.1, 1.0
START_SECONDS, END_SECONDS = 60.0, 120.0
ROLLED_BACK = "rollback_started"
RESUMED = "resumed_from_snapshot"


@dataclass
class Outcome:
    """What an act was. began, ended: of the time that counts, from the first updates on;
    findings: what is wrong.
    """

    act: Act
    faults: Sequence[Fault]
    began: float = 0.0
    ended: float = 0.0
    operations: list[Operation] = field(default_factory=list)
    evidence: Evidence = field(default_factory=lambda: Evidence([]))
    mended: list[Mending] = field(default_factory=list)
    growth: list[Growth] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def updates_per_second(self) -> float:
        """Of those that stayed."""
        return (self._version(self.ended) - self._version(self.began)) / (self.ended - self.began)

    def _version(self, at: float) -> int:
        """The newest that somebody had seen by then, or the one that it went back to."""
        looks = sorted((o.end, o.after) for o in self.operations if o.after >= 0)
        place = bisect_right(looks, (at, 1 << 62))
        return looks[place - 1][1] if place else 0

    def pushing_again(self, mending: Mending) -> float | None:
        """Seconds from the end of a fault to the end of a push that counted and began after it;
        None: never.
        """
        ends = [
            o.end
            for o in self.operations
            if o.applied and o.end > mending.ended and o.begin >= mending.began
        ]
        return min(ends) - mending.ended if ends else None


def run(act: Act, folder: Path, seconds: float, faults: Sequence[Fault] = ()) -> Outcome:
    """Carries it out. Artefacts are in the folder; what is wrong, in findings."""
    outcome = Outcome(act, faults)
    with Cluster(act, folder) as cluster:
        stage = _Stage(cluster)
        if stage.until(lambda: _all_push(cluster), START_SECONDS):
            outcome.began = time.monotonic()
            stage.play(faults, seconds)
        else:
            outcome.findings.append(
                Finding("starts", f"no updates of all workers within {START_SECONDS:g} s")
            )
        outcome.ended = time.monotonic()
        cluster.mend_all()
        cluster.ask_to_end()
        if not stage.until(lambda: cluster.done, END_SECONDS):
            outcome.findings.append(
                Finding("ends", f"workers still run {END_SECONDS:g} s after they were to end")
            )
        status, counters = _final(cluster)
        outcome.findings += _ended_well(cluster)
        outcome.operations = journal.read(cluster.journals)
        outcome.mended, outcome.growth = cluster.mended, cluster.gauges.growth()
        outcome.evidence = _evidence(cluster, outcome.operations, status, counters)
        outcome.findings += checker.check(outcome.evidence)
        outcome.findings += [
            Finding("flat", f"{g.name}: {g.excess}") for g in outcome.growth if g.excess
        ]
        outcome.findings += [Finding("ends as expected", text) for text in cluster.died]
    return outcome


class _Stage:
    """Time passes: a tick is a look at all processes."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._pause = threading.Event()
        self._measured = 0.0

    def until(self, condition: Any, seconds: float) -> bool:
        """Was it true in time?"""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            self._tick()
        return True

    def play(self, faults: Sequence[Fault], seconds: float) -> None:
        """Faults at their times, and their ends."""
        start, begun = time.monotonic(), {}
        events = sorted(
            (at, fault) for fault in faults for at in {fault.at, fault.at + fault.seconds}
        )
        while (now := time.monotonic() - start) < seconds:
            while events and events[0][0] <= now:
                _, fault = events.pop(0)
                if fault not in begun:
                    begun[fault] = time.monotonic()
                    self._cluster.break_(fault)
                if fault.at + fault.seconds <= now:
                    self._cluster.mend(fault, begun[fault])
            self._tick()

    def _tick(self) -> None:
        self._cluster.tend()
        if time.monotonic() - self._measured > MEASURE:
            self._measured = time.monotonic()
            self._cluster.measure()
        self._pause.wait(TICK)


def _all_push(cluster: Cluster) -> bool:
    operations = journal.read(cluster.journals)
    return len({o.process for o in operations if o.applied}) >= cluster.act.workers


def _final(cluster: Cluster) -> tuple[dict[str, Any], tuple[float, ...]]:
    """The job's status and counters when all workers have left; of a stopped job, as its servers
    find it again.
    """
    try:
        if not cluster.act.has_end:
            cluster.resume()
        with Client(cluster.servers.address, observe=True, connect_timeout=30.0) as client:
            status, weights = client.status(), client.pull()
    except (PSError, AssertionError) as error:
        return {"problem": str(error)}, ()
    counters = [array for name, array in weights.items() if name.startswith("counter")]
    return status, tuple(float(value) for array in counters for value in (array.min(), array.max()))


def _ended_well(cluster: Cluster) -> list[Finding]:
    """Stops the servers, and looks at their exit codes."""
    if cluster.stop_job():
        return [Finding("ends", "ps-ctl stop failed")]
    try:
        codes = [program.wait() for program in cluster.servers.programs]
    except AssertionError as error:
        return [Finding("ends", f"a server does not: {str(error)[:300]}")]
    return [Finding("ends", f"servers ended with {codes}")] if any(codes) else []


def _evidence(
    cluster: Cluster,
    operations: list[Operation],
    status: dict[str, Any],
    counters: tuple[float, ...],
) -> Evidence:
    flags = dict(zip(cluster.act.flags[::2], cluster.act.flags[1::2], strict=False))
    bounds = {name: int(flags[f"--{name}"]) for name in ("staleness",) if f"--{name}" in flags}
    return Evidence(
        operations,
        cluster.act.policy,
        durability=flags.get("--durability", "snapshot"),
        status=status,
        counters=counters,
        rollbacks=rollbacks(cluster.leaders, flags.get("--durability", "snapshot")),
        told_to_end=cluster.told_to_end,
        **bounds,
    )


def rollbacks(leaders: Sequence[Program], durability: str) -> list[Rollback]:
    """As shard 0 has announced them in its log. With a log, a start that resumes is no way back."""
    found = []
    offset = time.time() - time.monotonic()
    for line in [
        line for program in leaders for line in program.err.splitlines() if line.startswith("{")
    ]:
        event = json.loads(line)
        if event["event"] == ROLLED_BACK or (event["event"] == RESUMED and durability != "log"):
            found.append(
                Rollback(
                    datetime.fromisoformat(event["time"]).timestamp() - offset, event["version"]
                )
            )
    return found
