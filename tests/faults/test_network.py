"""Networks that fall silent, between real processes: who notices and says so, when it goes on,
and what has counted.
"""

import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.machine_time import machine_seconds
from tests.support.proxied_job import heard, lines, longest_silence, more
from tests.support.pushing_jobs import LINE, NOTICED, RESUMED, Jobs, finish, workers
from tests.support.workers import until

pytestmark = pytest.mark.timing

LINK_CUT = 10.0
GIVEN_UP = 13.0
"""Seconds until a connection for tensors, which may be a slow one, is given up
(pscommon/wire/channel.py).
"""


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    with ExitStack() as stack:
        yield Jobs(tmp_path, stack)


def test_a_round_that_waits_for_a_stopped_worker(jobs: Jobs) -> None:
    """Before 10 s are over, the waiting worker and the server have said at which step and shard
    it waits for whom.
    """
    job = jobs("sync", "60s", shards=1)
    job.lives["w1"].send(signal.SIGSTOP)
    began = time.monotonic()
    line = heard(job.lives["w0"], "waiting_for='worker ")
    notice = heard(job.lives["s0"], '"event": "update_delayed"')

    assert machine_seconds(began) < LINE
    assert re.search(
        r"push \d+ of worker \d on shard 0 at [\d.:]+' "
        r"waiting_for='worker \d \(rank 1, .*, step \d+\)",
        line,
    )
    assert re.search(r'"step": \d+, "waiting_for": "worker \d \(rank 1, ', notice)
    job.lives["w1"].send(signal.SIGCONT)
    more(workers(job), "pushed")
    finish(job)


def test_a_call_of_a_worker_that_vanished_is_given_up(jobs: Jobs) -> None:
    """The worker says within 4 s that it is alone; the server's thread is free before the call's
    time is over.
    """
    job = jobs("sync", "60s", shards=1)
    job.lives["w1"].send(signal.SIGSTOP)
    waiting = lines(job.lives["w0"], "pushed")

    def calls(method: str = "ExchangeOnce") -> float:
        return job.metrics(0)("ps_rpc_requests_total", method=method)

    so_far = until(
        lambda: calls() if lines(job.lives["w0"], "pushed") == waiting else 0, "a round that waits"
    )
    began = until(lambda: time.monotonic() if calls() > so_far else 0, "another slice of the wait")
    so_far, beats = calls(), calls("Heartbeat")
    until(lambda: calls("Heartbeat") > beats + 1, "a second in which the next call has arrived")
    job.proxies[0].half_open()
    told = more([job.lives["w0"]], "heartbeats_unanswered")
    until(lambda: calls() > so_far, "the call is given up")
    given_up = machine_seconds(began)
    print(
        f"\na peer that vanished: the worker says so after {told:.1f} s, its call is given up "
        f"after {given_up:.1f} s"
    )

    assert told <= NOTICED
    assert given_up <= GIVEN_UP
    job.lives["w1"].send(signal.SIGCONT)
    job.proxies[0].heal()
    more(workers(job), "pushed")
    finish(job)


def test_the_line_between_two_servers_is_cut_and_healed(jobs: Jobs) -> None:
    """Both say so within 4 s; workers say whom they wait for; then it goes on by itself, from
    where it was.

    Workers keep their connections to shard 0, and would tell shard 1 that way: nobody new gets
    through there.
    """
    job = jobs("async", "60s")
    began, cut = time.time(), time.monotonic()
    job.proxies[0].refuse()
    job.link.half_open()
    heard(job.lives["s0"], "shard_connection_lost")
    heard(job.lives["s1"], "coordinator_connection_lost")
    noticed = machine_seconds(cut)
    for life in workers(job):
        heard(life, "waiting_for='shard ")
    spoken = machine_seconds(cut)
    until(lambda: time.time() - began > LINK_CUT, "the end of the cut")
    stood = job.metrics(0)("ps_version")
    job.link.heal()
    resumed = more(workers(job), "pushed", times=2)
    job.proxies[0].heal()
    print(
        f"\na line between servers: noticed after {noticed:.1f} s, training {resumed:.1f} s after "
        f"the healing"
    )

    assert noticed <= NOTICED
    assert spoken < LINE
    assert resumed <= RESUMED
    assert longest_silence(job.lives["s1"], "shard 0 at", began, began + LINK_CUT) < LINE
    assert not lines(job.lives["s0"], "rollback_started")
    assert finish(job) > stood


def test_a_shard_that_lost_its_line_takes_the_way_that_workers_have(jobs: Jobs) -> None:
    """It may have tried the old one once more before a heartbeat tells the workers to speak to
    it.
    """
    job = jobs("async", "60s")
    cut = time.monotonic()
    job.link.half_open()
    heard(job.lives["s1"], "coordinator_connection_lost")
    noticed = machine_seconds(cut)
    resumed = more(workers(job), "pushed", times=2)

    assert noticed <= NOTICED
    assert resumed <= NOTICED
    assert len(lines(job.lives["s1"], "coordinator_connected")) == 2
    finish(job)
