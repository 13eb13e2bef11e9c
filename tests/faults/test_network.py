"""Silent networks between real processes: detection, log messages, recovery and counted pushes."""

import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.machine_time import machine_seconds
from tests.support.protection import protection_of
from tests.support.proxied_job import (
    ProxiedJob,
    lines,
    longest_silence,
    wait_for_line,
    wait_for_more_lines,
)
from tests.support.pushing_jobs import (
    DETECTION_SECONDS,
    LOG_INTERVAL_SECONDS,
    RECOVERY_SECONDS,
    JobStarter,
    stop_and_check,
    workers,
)
from tests.support.workers import until

pytestmark = pytest.mark.timing

LINK_CUT = 10.0
CANCEL_SECONDS = 13.0
"""Seconds until a silent connection for tensors is closed (pscommon/wire/endpoint.py)."""


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[JobStarter]:
    with ExitStack() as stack:
        yield JobStarter(tmp_path, stack)


def test_a_round_that_waits_for_a_stopped_worker_is_logged(jobs: JobStarter) -> None:
    """Within 10 s the waiting worker and the server log the step, the shard and the worker that the
    round waits for.
    """
    job = jobs("sync", "60s", shards=1)
    job.processes["w1"].send(signal.SIGSTOP)
    began = time.monotonic()
    line = wait_for_line(job.processes["w0"], "waiting_for='worker ")
    notice = wait_for_line(job.processes["s0"], '"event": "update_delayed"')

    assert machine_seconds(began) < LOG_INTERVAL_SECONDS
    assert re.search(
        r"push \d+ of worker \d on shard 0 at [\d.:]+' "
        r"waiting_for='worker \d \(rank 1, .*, step \d+\)",
        line,
    )
    assert re.search(r'"step": \d+, "waiting_for": "worker \d \(rank 1, ', notice)
    job.processes["w1"].send(signal.SIGCONT)
    wait_for_more_lines(workers(job), "pushed")
    stop_and_check(job)


def test_the_call_of_an_unreachable_worker_is_cancelled(jobs: JobStarter) -> None:
    """The worker logs within 4 s that it is disconnected. The server's thread is free before the
    deadline of the call. (Over a stream a waiting worker occupies no thread.)
    """
    job = jobs("sync", "60s", shards=1, lanes=("grpc", "grpc"))
    until(
        lambda: any(
            each["method"] == "Heartbeat" for each in job.metrics(0).labels("ps_rpc_requests_total")
        ),
        "a heartbeat",
    )
    job.processes["w1"].send(signal.SIGSTOP)
    waiting = lines(job.processes["w0"], "pushed")

    def calls(method: str = "ExchangeOnce") -> float:
        return job.metrics(0)("ps_rpc_requests_total", method=method)

    so_far = until(
        lambda: calls() if lines(job.processes["w0"], "pushed") == waiting else 0,
        "a round that waits",
    )
    began = until(lambda: time.monotonic() if calls() > so_far else 0, "another slice of the wait")
    so_far, beats = calls(), calls("Heartbeat")
    until(lambda: calls("Heartbeat") > beats + 1, "a second in which the next call has arrived")
    job.proxies[0].half_open()
    noticed = wait_for_more_lines([job.processes["w0"]], "heartbeats_unanswered")
    until(lambda: calls() > so_far, "the call is given up")
    cancelled_seconds = machine_seconds(began)
    print(
        f"\na peer that vanished: the worker says so after {noticed:.1f} s, its call is given up "
        f"after {cancelled_seconds:.1f} s"
    )

    assert noticed <= DETECTION_SECONDS
    assert cancelled_seconds <= CANCEL_SECONDS
    job.processes["w1"].send(signal.SIGCONT)
    job.proxies[0].heal()
    wait_for_more_lines(workers(job), "pushed")
    stop_and_check(job)


def between_servers(jobs: JobStarter, servers: str) -> ProxiedJob:
    """Start a job whose servers are connected as --lanes says; its workers use gRPC."""
    job = jobs("async", "60s", lanes=("grpc", "grpc"), server_lanes=servers)
    # a link sends and receives at the same time, which a TLS stream does not allow
    is_stream = servers == "stream" and not protection_of("ps-server")
    assert bool(job.stream_proxies[0].accepted) is is_stream
    return job


def cut_between_servers(job: ProxiedJob) -> None:
    """Let no byte pass between the servers any more."""
    job.link.half_open()
    job.stream_proxies[0].half_open()


@pytest.mark.parametrize("servers", ["stream", "grpc"])
def test_training_resumes_after_a_cut_between_two_servers(jobs: JobStarter, servers: str) -> None:
    """Both servers log the cut within 4 s; workers log that they wait for a shard.

    New connections to shard 0 are refused, because workers would otherwise tell shard 1 its
    address.
    """
    job = between_servers(jobs, servers)
    began, cut = time.time(), time.monotonic()
    job.proxies[0].refuse()
    cut_between_servers(job)
    wait_for_line(job.processes["s0"], "shard_connection_lost")
    wait_for_line(job.processes["s1"], "coordinator_connection_lost")
    noticed = machine_seconds(cut)
    for life in workers(job):
        wait_for_line(life, "waiting_for='shard ")
    logged = machine_seconds(cut)
    until(lambda: time.time() - began > LINK_CUT, "the end of the cut")
    version_at_cut = job.metrics(0)("ps_version")
    job.link.heal()
    job.stream_proxies[0].heal()
    resumed = wait_for_more_lines(workers(job), "pushed", times=2)
    job.proxies[0].heal()
    print(
        f"\na line between servers: noticed after {noticed:.1f} s, training {resumed:.1f} s after "
        f"the healing"
    )

    assert noticed <= DETECTION_SECONDS
    assert logged < LOG_INTERVAL_SECONDS
    assert resumed <= RECOVERY_SECONDS
    assert (
        longest_silence(job.processes["s1"], "shard 0 at", began, began + LINK_CUT)
        < LOG_INTERVAL_SECONDS
    )
    assert not lines(job.processes["s0"], "rollback_started")
    assert stop_and_check(job) > version_at_cut


@pytest.mark.parametrize("servers", ["stream", "grpc"])
def test_a_disconnected_shard_reaches_shard_0_through_the_workers_address(
    jobs: JobStarter, servers: str
) -> None:
    """It may retry its old address once before a heartbeat makes the workers introduce the
    new one.
    """
    job = between_servers(jobs, servers)
    cut = time.monotonic()
    cut_between_servers(job)
    wait_for_line(job.processes["s1"], "coordinator_connection_lost")
    noticed = machine_seconds(cut)
    resumed = wait_for_more_lines(workers(job), "pushed", times=2)

    assert noticed <= DETECTION_SECONDS
    assert resumed <= DETECTION_SECONDS
    assert len(lines(job.processes["s1"], "coordinator_connected")) == 2
    stop_and_check(job)
