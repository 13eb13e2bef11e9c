"""One job of the soak test: it runs for a while, with or without faults, ends and is checked."""

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
from tests.chaos.cluster import Cluster, EndedFault, SoakJob
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
    """Result of one job.

    began, ended: start and end of the measured time; it starts with the first updates.
    findings: broken rules.
    """

    soak_job: SoakJob
    faults: Sequence[Fault]
    began: float = 0.0
    ended: float = 0.0
    operations: list[Operation] = field(default_factory=list)
    evidence: Evidence = field(default_factory=lambda: Evidence([]))
    ended_faults: list[EndedFault] = field(default_factory=list)
    growth: list[Growth] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def updates_per_second(self) -> float:
        """Rate of updates that were not rolled back."""
        return (self._version(self.ended) - self._version(self.began)) / (self.ended - self.began)

    def _version(self, at: float) -> int:
        """Return the newest version that a worker had observed at this time, with rollbacks."""
        observed = sorted((o.end, o.after) for o in self.operations if o.after >= 0)
        index = bisect_right(observed, (at, 1 << 62))
        return observed[index - 1][1] if index else 0

    def seconds_to_next_push(self, ended_fault: EndedFault) -> float | None:
        """Return the seconds from the end of a fault to the end of a counted push that began after
        it.

        None if there is no such push.
        """
        ends = [
            o.end
            for o in self.operations
            if o.applied and o.end > ended_fault.ended and o.begin >= ended_fault.began
        ]
        return min(ends) - ended_fault.ended if ends else None


def run(soak_job: SoakJob, folder: Path, seconds: float, faults: Sequence[Fault] = ()) -> Outcome:
    """Run a job with faults; leave artefacts in the folder and broken rules in `findings`."""
    outcome = Outcome(soak_job, faults)
    with Cluster(soak_job, folder) as cluster:
        driver = _Driver(cluster)
        if driver.until(lambda: _all_push(cluster), START_SECONDS):
            outcome.began = time.monotonic()
            driver.inject(faults, seconds)
        else:
            outcome.findings.append(
                Finding("starts", f"no updates of all workers within {START_SECONDS:g} s")
            )
        outcome.ended = time.monotonic()
        cluster.end_all_faults()
        cluster.request_end()
        if not driver.until(lambda: cluster.done, END_SECONDS):
            outcome.findings.append(
                Finding("ends", f"workers still run {END_SECONDS:g} s after the end was requested")
            )
        status, counters = _final(cluster)
        outcome.findings += _check_server_exits(cluster)
        outcome.operations = journal.read(cluster.journals)
        outcome.ended_faults, outcome.growth = cluster.ended_faults, cluster.gauges.growth()
        outcome.evidence = _evidence(cluster, outcome.operations, status, counters)
        outcome.findings += checker.check(outcome.evidence)
        outcome.findings += [
            Finding("flat", f"{g.name}: {g.excess}") for g in outcome.growth if g.excess
        ]
        outcome.findings += [Finding("ends as expected", text) for text in cluster.died]
    return outcome


class _Driver:
    """Calls the cluster's supervision in each tick."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._pause = threading.Event()
        self._measured = 0.0

    def until(self, condition: Any, seconds: float) -> bool:
        """Return whether the condition became true in time."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            self._tick()
        return True

    def inject(self, faults: Sequence[Fault], seconds: float) -> None:
        """Begin and end the faults at their times."""
        start, started_at = time.monotonic(), {}
        events = sorted(
            (at, fault) for fault in faults for at in {fault.at, fault.at + fault.seconds}
        )
        while (now := time.monotonic() - start) < seconds:
            while events and events[0][0] <= now:
                _, fault = events.pop(0)
                if fault not in started_at:
                    started_at[fault] = time.monotonic()
                    self._cluster.begin_fault(fault)
                if fault.at + fault.seconds <= now:
                    self._cluster.end_fault(fault, started_at[fault])
            self._tick()

    def _tick(self) -> None:
        self._cluster.restart_crashed()
        if time.monotonic() - self._measured > MEASURE:
            self._measured = time.monotonic()
            self._cluster.measure()
        self._pause.wait(TICK)


def _all_push(cluster: Cluster) -> bool:
    operations = journal.read(cluster.journals)
    return len({o.process for o in operations if o.applied}) >= cluster.soak_job.workers


def _final(cluster: Cluster) -> tuple[dict[str, Any], tuple[float, ...]]:
    """Return status and counters when all workers have left; restart the servers of a stopped
    job.
    """
    try:
        if not cluster.soak_job.has_end:
            cluster.restart_servers()
        with Client(cluster.servers.address, observe=True, connect_timeout=30.0) as client:
            status, weights = client.status(), client.pull()
    except (PSError, AssertionError) as error:
        return {"problem": str(error)}, ()
    counters = [array for name, array in weights.items() if name.startswith("counter")]
    return status, tuple(float(value) for array in counters for value in (array.min(), array.max()))


def _check_server_exits(cluster: Cluster) -> list[Finding]:
    """Stop the servers and check their exit codes."""
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
    flags = dict(zip(cluster.soak_job.flags[::2], cluster.soak_job.flags[1::2], strict=False))
    bounds = {name: int(flags[f"--{name}"]) for name in ("staleness",) if f"--{name}" in flags}
    return Evidence(
        operations,
        cluster.soak_job.policy,
        durability=flags.get("--durability", "snapshot"),
        status=status,
        counters=counters,
        rollbacks=rollbacks(cluster.leaders, flags.get("--durability", "snapshot")),
        stopped_at=cluster.stopped_at,
        **bounds,
    )


def rollbacks(leaders: Sequence[Program], durability: str) -> list[Rollback]:
    """Return the rollbacks in the logs of shard 0. With a log, a resumed start is no rollback."""
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
