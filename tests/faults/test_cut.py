"""A network cut of 30 seconds, for three jobs at the same time."""

import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.link import SERVER_ADDRESS, inside, missing
from tests.support.machine_time import machine_seconds
from tests.support.namespaces import FAST, Cable
from tests.support.process_job import MODULES
from tests.support.programs import BIN, Program, Programs, programs_in
from tests.support.proxied_job import ProxiedJob, lines, longest_silence, wait_for_more_lines
from tests.support.pushing_jobs import (
    DETECTION_SECONDS,
    LOG_INTERVAL_SECONDS,
    RECOVERY_SECONDS,
    JobStarter,
    stop_and_check,
    workers,
)
from tests.support.workers import until

CUT = 30.0
ADDRESS = f"{SERVER_ADDRESS}:4712"

SCRIPT = f"""
from pscommon.telemetry import logs
from tests.support.worker_scripts import count
logs.set_up("info", "text")
count("{ADDRESS}", 0, 10**6, pause=0.02)
"""


# one cut for all tests: they run in one process
pytestmark = pytest.mark.timing


@dataclass
class CutResult:
    """Three jobs and the times measured around a cut.

    patient: its leases outlast the cut.
    strict: its leases end during the cut.
    missing: why there is no wired job.
    wired: worker of a job over a cable between two namespaces.
    began: by time.time().
    noticed, resumed: seconds of the slowest worker behind a proxy.
    wired_resumed: upper bound in seconds.
    """

    patient: ProxiedJob
    strict: ProxiedJob
    missing: str
    wired: Program | None
    began: float = 0.0
    noticed: float = 0.0
    resumed: float = 0.0
    wired_resumed: float = 0.0


def start_wired(programs: Programs, cable: Cable) -> Program:
    """Start a server and a worker at the ends of a cable; return the worker when it trains."""

    def within(name: str, *command: object) -> Program:
        prefix, *rest = inside(name)
        return programs.start(str(shutil.which(prefix)), *rest, *command, PYTHONPATH=MODULES)

    flags = ("--policy", "async", "--lease", "60s", "--lanes", "grpc")
    within(cable.server, BIN / "ps-server", "--bind", ADDRESS, "--insecure", *flags).wait_for(
        "listening"
    )
    worker = within(cable.worker, BIN / "python", programs.script(SCRIPT))
    worker.wait_for("pushed", times=20)
    return worker


@pytest.fixture(scope="module")
def outage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CutResult]:
    folder: Path = tmp_path_factory.mktemp("cut")
    with ExitStack() as stack:
        reason = missing()
        cable = None if reason else stack.enter_context(Cable())
        programs, jobs = stack.enter_context(programs_in(folder)), JobStarter(folder, stack)
        wired = start_wired(programs, cable) if cable else None
        result = CutResult(jobs("sync", "60s"), jobs("sync", "5s"), reason, wired)
        cut_and_heal(result, cable)
        yield result


def cut_and_heal(result: CutResult, cable: Cable | None) -> None:
    """Cut the networks, heal them, and measure detection and recovery."""
    pushing = [*workers(result.patient), *workers(result.strict)]
    proxies = [*result.patient.all_proxies, *result.strict.all_proxies]
    for proxy in proxies:
        proxy.half_open()
    if cable is not None:
        cable.silence()
    result.began = time.time()
    result.noticed = wait_for_more_lines(pushing, "heartbeats_unanswered")
    until(lambda: time.time() - result.began > CUT, "the end of the cut", 2 * CUT)
    pushes_before = result.wired.out.count("pushed") if result.wired else 0
    healed = time.monotonic()
    for proxy in proxies:
        proxy.heal()
    if cable is not None:
        cable.rate(FAST)
    wait_for_more_lines(pushing, "pushed", times=2)
    result.resumed = machine_seconds(healed)
    if result.wired is not None:
        result.wired.wait_for("pushed", times=pushes_before + 2)
        result.wired_resumed = machine_seconds(healed)


def test_a_cut_is_detected_and_each_wait_is_logged(outage: CutResult) -> None:
    print(f"\ncut of {CUT:.0f} s: noticed after {outage.noticed:.1f} s")
    assert outage.noticed <= DETECTION_SECONDS
    for life in workers(outage.patient) + workers(outage.strict):
        assert (
            longest_silence(life, "shard ", outage.began, outage.began + CUT) < LOG_INTERVAL_SECONDS
        )


def test_training_resumes_soon_after_a_cut(outage: CutResult) -> None:
    print(f"\ncut of {CUT:.0f} s: training {outage.resumed:.1f} s after the healing")
    assert outage.resumed <= RECOVERY_SECONDS


def test_workers_whose_leases_outlast_a_cut_continue(outage: CutResult) -> None:
    """No push is lost or counted twice."""
    assert [lines(life, "fenced") for life in workers(outage.patient)] == [[], []]
    assert not lines(outage.patient.processes["s0"], "rollback_started")
    stop_and_check(outage.patient)


def test_workers_whose_leases_end_in_a_cut_rejoin_as_new(outage: CutResult) -> None:
    """They are fenced; their acknowledged pushes count."""
    assert [len(lines(life, "fenced")) for life in workers(outage.strict)] == [1, 1]
    assert not lines(outage.strict.processes["s0"], "rollback_started")
    stop_and_check(outage.strict, fenced=2)


def test_training_resumes_after_a_cable_lost_all_packets(outage: CutResult) -> None:
    if outage.wired is None:
        pytest.skip(outage.missing)
    print(f"\ncable cut for {CUT:.0f} s: training {outage.wired_resumed:.1f} s after the healing")

    assert outage.wired_resumed <= RECOVERY_SECONDS
    assert "fenced" not in outage.wired.out
    assert "does not answer" in outage.wired.err
