"""`ps-ctl why` and `ps-ctl trace` on real jobs that are slow in one place.

`make test-why` draws more of them: WHY_CASES jobs of a place, a process, a policy and a lane.
"""

import itertools
import json
import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pscommon.core.exit_codes import ExitCode
from pscommon.tracing.recorder import RECORDING_SECONDS
from psworker.core.trace_events import from_document
from psworker.ctl.job_client import CoordinatorClient
from psworker.ctl.tracing import Recording
from tests.support.process_job import MODULES, Servers, kill, status_of, wait_for_version, worker
from tests.support.programs import BIN, Programs, programs_in
from tests.support.slowed_job import FIRST_VERSION, PLACES, SCRIPT, Place, slowed_job
from tests.support.workers import until

POLICIES, LANES = ("sync", "async", "ssp"), ("stream", "grpc", "shm")
DRAWN_COUNT = int(os.environ.get("WHY_CASES", "0"))
SEED = int(os.environ.get("WHY_SEED", "1"))


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with programs_in(tmp_path) as programs:
        yield programs


def is_possible(place: Place, policy: str, lane: str) -> bool:
    """Return whether a job can be slow there.

    Shared memory has no link. A stream between shards does not pass through the proxy of `shards`,
    but through that of a link to shard 0, which would be slow as well.
    """
    if (place.name, place.number, lane) == ("link", 0, "stream"):
        return False
    lanes = {"link": ("stream", "grpc"), "shards": ("grpc",)}.get(place.name, LANES)
    return lane in lanes


def drawn_cases() -> Iterator[tuple[Place, str, str]]:
    cases = [each for each in itertools.product(PLACES, POLICIES, LANES) if is_possible(*each)]
    yield from random.Random(SEED).sample(cases, DRAWN_COUNT)


EACH_PLACE = [
    (next(place for place in PLACES if (place.name, place.number) == (name, number)), "sync", lane)
    for name, number, lane in (
        ("data", 1, "stream"),
        ("compute", 0, "shm"),
        ("link", 1, "stream"),
        ("apply", 1, "grpc"),
        ("log", 1, "stream"),
        ("standby", 0, "stream"),
        ("answer", 0, "stream"),
        ("decision", 0, "stream"),
        ("shards", 1, "grpc"),
    )
]


def explained(programs: Programs, address: str, *flags: object) -> dict[str, Any]:
    """Return what `ps-ctl why` says of the job."""
    program = programs.run("ps-ctl", "--ps", address, "why", "--output", "json", *flags)
    assert program.wait() == 0, program.output
    found: dict[str, Any] = json.loads(program.out)
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    ("place", "policy", "lane"),
    [*EACH_PLACE, *drawn_cases()],
    ids=lambda each: f"{each.name}{each.number}" if isinstance(each, Place) else each,
)
def test_the_slow_place_is_named(programs: Programs, place: Place, policy: str, lane: str) -> None:
    with slowed_job(programs, place, policy, lane) as address:
        numbers = {each["rank"]: each["worker"] for each in status_of(address)["workers"]}
        found = explained(programs, address)

    # a link is that of the job's only worker
    number = numbers[0 if place.name == "link" else place.number] if "worker" in place.who else 0
    cause = found["bottleneck"] or {}
    expected = (place.phase, place.who.format(worker=number))
    assert (cause.get("phase"), cause.get("who")) == expected, json.dumps(found, indent=1)
    exposed = sum(phase["own"] + phase["waited"] for phase in found["phases"].values())
    assert exposed == pytest.approx(found["step_seconds"], rel=0.05)
    assert cause["gain"] == pytest.approx(cause["seconds"] / found["step_seconds"], rel=1e-3)


@pytest.mark.full
def test_the_clock_of_a_worker_in_another_time_namespace(programs: Programs) -> None:
    """Its monotonic clock is 1000 s ahead, and its spans lie where they belong."""
    unshare = shutil.which("unshare") or "unshare"
    probe = programs.run(unshare, "--time", "true")
    if probe.wait():
        pytest.skip(f"no time namespace can be made here: {probe.err.strip()}")
    script, file = programs.script(SCRIPT), programs.folder / "trace.json"
    with Servers(programs, 2) as servers:
        join = ("--ps", servers.address, "--device", "cpu", script)
        ahead = (unshare, "--time", "--monotonic", 1000, BIN / "ps-worker")
        programs.start(*ahead, *join, PYTHONPATH=MODULES)
        worker(programs, servers, 1, script)
        wait_for_version(servers.address, FIRST_VERSION)
        recorded = programs.run("ps-ctl", "--ps", servers.address, "trace", "-o", file)
        assert recorded.wait() == 0, recorded.output

    trace = from_document(json.loads(file.read_text()))
    clocks = {(each.role, each.number): each for each in trace.processes}
    (far,) = (each for each in clocks.values() if abs(each.offset_seconds) > 500)
    assert far.role == "worker"
    assert far.uncertainty_seconds is not None
    assert abs(far.offset_seconds + 1000) <= far.uncertainty_seconds
    arrived = {
        span.pushes: span.ended for span in clocks["shard", 0].spans if span.name == "receive"
    }
    travelled = [
        arrived[span.pushes] - span.began - far.offset_seconds
        for span in far.spans
        if span.name == "send" and span.shard == 0 and span.pushes in arrived
    ]
    assert len(travelled) > 10
    assert min(travelled) >= -far.uncertainty_seconds


@pytest.mark.full
def test_a_killed_reader_leaves_nothing_on_and_two_may_read(programs: Programs) -> None:
    with Servers(programs, 2) as servers, CoordinatorClient(servers.binds, 10) as client:
        worker(programs, servers, 0, programs.script(SCRIPT))
        wait_for_version(servers.address, FIRST_VERSION)
        readers = [
            programs.start("ps-ctl", "--ps", servers.address, "why", "--seconds", seconds)
            for seconds in (5, 600)
        ]
        assert readers[0].wait() == 0, readers[0].output
        assert "bottleneck" in readers[0].out
        kill(readers[1])

        asked_at = client.spans(None).next
        quiet_since = time.monotonic()
        until(lambda: time.monotonic() - quiet_since > RECORDING_SECONDS + 2, "the end", 10)
        assert not client.spans(asked_at).parts


@pytest.mark.full
def test_a_job_that_ends_meanwhile_is_explained_by_what_was_recorded(programs: Programs) -> None:
    with Servers(programs, 2) as servers:
        worker(programs, servers, 0, programs.script(SCRIPT))
        wait_for_version(servers.address, FIRST_VERSION)
        with CoordinatorClient(servers.binds, 10) as client:
            recording, lines = Recording(client), list[str]()

            def stop_after_five_requests(line: str) -> None:
                lines.append(line)
                if len(lines) == 5:
                    programs.run("ps-ctl", "--ps", servers.address, "stop")

            trace = recording.run(600, stop_after_five_requests)

    assert "does not answer" in recording.problem
    assert trace.seconds < 60
    assert {each.role for each in trace.processes} == {"shard", "worker"}


@pytest.mark.full
def test_a_job_without_steps_says_what_it_waits_for(programs: Programs) -> None:
    with Servers(programs, 1, "--min-workers", 2) as servers:
        worker(programs, servers, 0, programs.script(SCRIPT))
        until(lambda: status_of(servers.address).get("workers"), "a worker")

        found = programs.run("ps-ctl", "--ps", servers.address, "why", "--seconds", 1)

    assert found.wait() == ExitCode.UNREACHABLE, found.output
    assert "the job made no step in 1 s" in found.err
