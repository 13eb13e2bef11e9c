"""The network is gone for 30 seconds: for three jobs at the same time, since most of this is
waiting.
"""

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
from tests.support.proxied_job import ProxiedJob, lines, longest_silence, more
from tests.support.pushing_jobs import LINE, NOTICED, RESUMED, Jobs, finish, workers
from tests.support.workers import until

CUT = 30.0
ADDRESS = f"{SERVER_ADDRESS}:4712"

SCRIPT = f"""
from pscommon.telemetry import logs
from tests.support.worker_scripts import count
logs.set_up("info", "text")
count("{ADDRESS}", 0, 10**6, pause=0.02)
"""


# one cut for all tests, in one process
pytestmark = pytest.mark.timing


@dataclass
class Outage:
    """patient: its leases outlast the cut; strict: they do not; wired: the worker of a job over
    a cable between two namespaces; missing: why there is none. began: by time.time(). noticed,
    resumed: seconds, of the slowest worker behind a proxy; wired_resumed: at most."""

    patient: ProxiedJob
    strict: ProxiedJob
    missing: str
    wired: Program | None
    began: float = 0.0
    noticed: float = 0.0
    resumed: float = 0.0
    wired_resumed: float = 0.0


def start_wired(programs: Programs, cable: Cable) -> Program:
    """A server and a worker at the two ends of a cable; returns the worker, once it trains."""

    def within(name: str, *command: object) -> Program:
        prefix, *rest = inside(name)
        return programs.start(str(shutil.which(prefix)), *rest, *command, PYTHONPATH=MODULES)

    flags = ("--policy", "async", "--lease", "60s", "--lanes", "grpc")
    within(cable.server, BIN / "ps-server", "--bind", ADDRESS, *flags).wait_for("listening")
    worker = within(cable.worker, BIN / "python", programs.script(SCRIPT))
    worker.wait_for("pushed", times=20)
    return worker


@pytest.fixture(scope="module")
def outage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outage]:
    folder: Path = tmp_path_factory.mktemp("cut")
    with ExitStack() as stack:
        reason = missing()
        cable = None if reason else stack.enter_context(Cable())
        programs, jobs = stack.enter_context(programs_in(folder)), Jobs(folder, stack)
        wired = start_wired(programs, cable) if cable else None
        found = Outage(jobs("sync", "60s"), jobs("sync", "5s"), reason, wired)
        suffer(found, cable)
        yield found


def suffer(found: Outage, cable: Cable | None) -> None:
    """The cut, the healing, and what is measured of both."""
    pushing = [*workers(found.patient), *workers(found.strict)]
    proxies = [*found.patient.everywhere, *found.strict.everywhere]
    for proxy in proxies:
        proxy.half_open()
    if cable is not None:
        cable.silence()
    found.began = time.time()
    found.noticed = more(pushing, "heartbeats_unanswered")
    until(lambda: time.time() - found.began > CUT, "the end of the cut", 2 * CUT)
    said = found.wired.out.count("pushed") if found.wired else 0
    healed = time.monotonic()
    for proxy in proxies:
        proxy.heal()
    if cable is not None:
        cable.rate(FAST)
    more(pushing, "pushed", times=2)
    found.resumed = machine_seconds(healed)
    if found.wired is not None:
        found.wired.wait_for("pushed", times=said + 2)
        found.wired_resumed = machine_seconds(healed)


def test_it_is_noticed_and_nobody_waits_without_a_line(outage: Outage) -> None:
    print(f"\ncut of {CUT:.0f} s: noticed after {outage.noticed:.1f} s")
    assert outage.noticed <= NOTICED
    for life in workers(outage.patient) + workers(outage.strict):
        assert longest_silence(life, "shard ", outage.began, outage.began + CUT) < LINE


def test_training_resumes_soon_after_the_healing(outage: Outage) -> None:
    print(f"\ncut of {CUT:.0f} s: training {outage.resumed:.1f} s after the healing")
    assert outage.resumed <= RESUMED


def test_a_lease_that_outlasts_the_cut_is_kept(outage: Outage) -> None:
    """The same workers go on, nothing is lost and nothing counts twice."""
    assert [lines(life, "fenced") for life in workers(outage.patient)] == [[], []]
    assert not lines(outage.patient.lives["s0"], "rollback_started")
    finish(outage.patient)


def test_a_lease_that_ends_in_the_cut_makes_new_workers(outage: Outage) -> None:
    """They are fenced, told so, and come back; what was acknowledged has counted."""
    assert [len(lines(life, "fenced")) for life in workers(outage.strict)] == [1, 1]
    assert not lines(outage.strict.lives["s0"], "rollback_started")
    finish(outage.strict, fenced=2)


def test_a_cable_that_loses_every_packet(outage: Outage) -> None:
    if outage.wired is None:
        pytest.skip(outage.missing)
    print(f"\ncable cut for {CUT:.0f} s: training {outage.wired_resumed:.1f} s after the healing")

    assert outage.wired_resumed <= RESUMED
    assert "fenced" not in outage.wired.out
    assert "does not answer" in outage.wired.err
