"""Hostile input on every method, port and lane, beside an honest worker.

No server crashes or hangs, its memory stays, and only the client is blamed. `make fuzz` sends more:
FUZZ_REQUESTS, FUZZ_BYTES, and FUZZ_SEED, which repeats a run.
"""

import os
import secrets
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from pscommon.telemetry.logs import LIMITED_SECONDS
from tests.support.hostile_job import SENDERS, SHARDS, HostileJob
from tests.support.hostile_requests import byte_strings, calls, streams

BATCH_COUNT = 20
"""Requests that are sent at once, before the next step of the honest worker."""
TARGETS = (0, 0, 0, 0, 1, 2)
"""Mostly shard 0, which answers all requests; also shard 1 and the standby."""
MAX_GROWTH_NBYTES = 50 << 20
CLOCK_SECONDS = 0.1
PARTS = 4
"""Parts of an attack. Malloc returns no memory to the system (process_limits.py), so servers keep
what the largest requests took. The last part repeats the one before: it must not need more.
"""

SETTINGS = settings(
    phases=[Phase.generate],
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def attack(job: HostileJob, requests: int, byte_count: int, seed_number: int) -> None:
    """Send requests and byte strings; the honest worker makes a step after each batch."""
    batches = -(-requests // BATCH_COUNT)
    count = -(-byte_count // batches)
    failures = list[Exception]()

    @seed(seed_number)
    @settings(SETTINGS, max_examples=batches)
    @given(
        st.lists(calls(job.bases, SENDERS), min_size=BATCH_COUNT, max_size=BATCH_COUNT),
        st.lists(
            st.tuples(st.sampled_from(range(10)), byte_strings(), streams(job.bases)),
            min_size=count,
            max_size=count,
        ),
        st.sampled_from(TARGETS),
    )
    def send(batch: Any, strings: Any, target: int) -> None:
        if failures:
            return
        try:
            job.send(batch, target)
            for port, sent, frames in strings:
                job.send_bytes(job.ports[port], sent)
                job.send_stream(port % SHARDS, frames)
            job.step()
            job.join()
        except Exception as failure:  # hypothesis would send the batch again
            failures.append(failure)

    send()
    if failures:
        raise failures[0]


def check_logs(job: HostileJob) -> None:
    """Check that there is no traceback, and that what a peer causes is logged rarely."""
    last: dict[tuple[str, str], datetime] = {}
    for name, line in job.log_lines():
        assert "exception" not in line or line["logger"].startswith("grpc"), f"{name}: {line}"
        if line["level"] in ("warning", "error") and "worker" not in line:
            kind = line["logger"] if line["logger"].startswith("grpc") else line["event"]
            key, time = (name, kind), datetime.fromisoformat(line["time"][:-1])
            pause = (time - last.get(key, datetime.min)).total_seconds()
            assert pause > LIMITED_SECONDS - CLOCK_SECONDS, f"after {pause} s: {name}: {line}"
            last[key] = time


def run(folder: Path, requests: int, byte_count: int, seed_number: int) -> None:
    """Attack a job, restart its servers, and check all that the attack may not change."""
    print(f"FUZZ_SEED={seed_number} FUZZ_REQUESTS={requests} FUZZ_BYTES={byte_count}")
    with HostileJob(folder) as job:
        try:
            for part in range(PARTS - 1):
                attack(job, requests // PARTS, byte_count // PARTS, seed_number + part)
            before = job.memory_nbytes()
            attack(job, requests // PARTS, byte_count // PARTS, seed_number + PARTS - 2)
            growth = {name: after - before[name] for name, after in job.memory_nbytes().items()}
            print(f"growth in bytes: {growth}")
            job.restart()
            job.step()
            job.join()
            attack(job, BATCH_COUNT, 1, seed_number + PARTS)
        except BaseException:
            print("\n".join(map(job.tail, job.names)))
            raise
        check_logs(job)
        assert max(growth.values()) < MAX_GROWTH_NBYTES, growth


def test_hostile_input_stops_nothing(tmp_path: Path) -> None:
    run(tmp_path, 600, 60, 0)


@pytest.mark.full
@pytest.mark.timeout(3600 * 12)
def test_more_hostile_input_stops_nothing(tmp_path: Path) -> None:
    """About three minutes, of another seed each time."""
    requests = int(os.environ.get("FUZZ_REQUESTS", "20000"))
    byte_count = int(os.environ.get("FUZZ_BYTES", "2000"))
    run(tmp_path, requests, byte_count, int(os.environ.get("FUZZ_SEED") or secrets.randbits(32)))
