"""Hostile input on every method, port and lane: no crash, no hang, and an honest worker trains on.

`make fuzz` sends 100 000 requests and 10 000 byte strings: FUZZ_REQUESTS, FUZZ_BYTES, FUZZ_SEED.
"""

from collections import defaultdict
from datetime import datetime
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from pscommon.telemetry.logs import LIMITED_SECONDS
from tests.support.hostile_job import SENDERS, SHARDS, HostileJob
from tests.support.hostile_requests import byte_strings, calls, streams

BATCH_COUNT = 20
MAX_GROWTH_NBYTES = 50 << 20
CLOCK_SECONDS = 0.1


def attack(job: HostileJob, requests: int, byte_count: int, seed_number: int) -> None:
    """Send this many requests and byte strings, with a step of the honest worker after each
    batch.
    """
    batches = -(-requests // BATCH_COUNT)
    bytes_per_batch = -(-byte_count // batches)
    failures = list[Exception]()

    @seed(seed_number)
    @settings(
        max_examples=batches,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        st.lists(calls(job.bases, SENDERS), min_size=BATCH_COUNT, max_size=BATCH_COUNT),
        st.lists(
            st.tuples(st.sampled_from(range(10)), byte_strings(), streams(job.bases)),
            min_size=bytes_per_batch,
            max_size=bytes_per_batch,
        ),
        st.sampled_from(range(SHARDS + 1)),
    )
    def send(batch: Any, strings: Any, target: int) -> None:
        if failures:
            return
        try:
            send_one(batch, strings, target)
        except Exception as failure:  # hypothesis would send the batch again
            failures.append(failure)

    def send_one(batch: Any, strings: Any, target: int) -> None:
        job.send(batch, target)
        for port, sent, frames in strings:
            job.send_bytes(job.ports[port], sent)
            job.send_stream(port % SHARDS, frames)
        job.step()
        job.join()

    send()
    if failures:
        raise failures[0]


def check_logs(job: HostileJob) -> None:
    """No traceback, and at most one line of an event that a peer causes in its time."""
    last: dict[tuple[str, str], datetime] = defaultdict(lambda: datetime.min)
    for name, line in job.log_lines():
        assert "exception" not in line, f"{name}: {line}"
        if line["level"] in ("warning", "error") and "worker" not in line:
            key, time = (name, line["event"]), datetime.fromisoformat(line["time"][:-1])
            pause = (time - last[key]).total_seconds()
            assert pause > LIMITED_SECONDS - CLOCK_SECONDS, f"{pause}: {name}: {line}"
            last[key] = time
