"""Operating a running job: drain workers, change the policy, find slow workers."""

import json
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from pscommon.core.errors import InvalidRequestError
from pscommon.wire import messages as codec
from pscommon.wire.endpoint import Endpoint, open_channel
from psproto.v1 import coordinator_pb2 as co
from psproto.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from psworker import Client
from psworker.ctl.cli import main as ps_ctl
from psworker.ctl.job_client import CoordinatorClient
from tests.support.cluster import Cluster
from tests.support.ctl_output import ctl
from tests.support.data_training import assert_each_once, train
from tests.support.events import events, records_of
from tests.support.programs import Programs, programs_in
from tests.support.wire_calls import sent_by
from tests.support.workers import (
    DEADLINE,
    ONES,
    OUTLIVED,
    count,
    counted,
    counter,
    joined,
    status,
    together,
    until,
    weights_of,
)

Make = Callable[..., Cluster]
Output = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _no_external_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PS_PS", "PS_SERVERS", "PS_OUTPUT", "PS_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with programs_in(tmp_path) as programs:
        yield programs


def row_of(address: str, worker: int) -> dict[str, Any]:
    """Return the status row of one worker."""
    (found,) = [row for row in status(address)["workers"] if row["worker"] == worker]
    return dict(found)


# ---- drain ---------------------------------------------------------------------------------------

# It waits in its fourth step for a message, and completes that step.
DRAINED = """
import json, threading, psworker
from tests.support.data_training import train
used = []
with psworker.connect() as job:
    def each(step):
        if step == 3:
            print("asks for it:", job.client.worker, flush=True)
            while not job.stopping:
                threading.Event().wait(0.01)
    try:
        train(job, each, used)
    finally:
        print("used", json.dumps(used), flush=True)
print("end", flush=True)
"""


def test_a_drained_worker_ends_after_its_step_and_each_sample_counts_once(
    cluster: Make, programs: Programs, capsys: Output
) -> None:
    address = cluster(2, min_workers=2).address
    path = f"{ROOT}:{ROOT / 'common'}"
    drained = programs.fork("ps-worker", "--ps", address, programs.script(DRAINED), PYTHONPATH=path)

    def other() -> list[tuple[int, ...]]:
        with joined(address, 1) as job:
            return train(job)

    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(other)
        worker = int(drained.wait_for("asks for it:").split()[-1])
        found = ctl(capsys, "--ps", address, "drain", worker)

        assert (found["worker"], found["state"]) == (worker, "draining")
        assert drained.wait() == 0, drained.output
        used = [tuple(batch) for batch in batches_in(drained.out)]
        assert len(used) == 4
        assert "end" not in drained.out
        assert_each_once([used, rest.result(DEADLINE)], address)
    assert (row_of(address, worker)["state"], row_of(address, worker)["steps"]) == ("left", 4)


def batches_in(text: str) -> list[list[int]]:
    """Return the batches that a script reports as used."""
    (line,) = [line for line in text.splitlines() if line.startswith("used ")]
    batches: list[list[int]] = json.loads(line.removeprefix("used "))
    return batches


def test_an_absent_worker_cannot_be_drained(cluster: Make, capsys: Output) -> None:
    address = cluster(1).address
    with counter(address) as missing:
        count(missing)
    with counter(address) as client:
        for worker in (missing.worker, 999):
            assert ps_ctl(["--ps", address, "drain", str(worker)]) == 2
            error = capsys.readouterr().err
            assert (
                f"worker {worker} cannot be drained: it is not a member. Members: {client.worker} "
                in error
            )
    assert ps_ctl(["--ps", address, "drain", "1"]) == 2
    assert "Members: none" in capsys.readouterr().err


# ---- policy --------------------------------------------------------------------------------------


def waiting_push(address: str, client: Client, other: Client, pool: ThreadPoolExecutor) -> Any:
    """Return a push that waits for the other worker's."""
    push = pool.submit(client.push, ONES)
    until(lambda: f"worker {other.worker} " in status(address)["waiting_for"], "a push that waits")
    return push


def test_a_new_policy_applies_from_the_next_update(cluster: Make, capsys: Output) -> None:
    address = cluster(2, min_workers=2).address
    with ThreadPoolExecutor(1) as pool, counter(address, 0) as quick, counter(address, 1) as slow:
        push = waiting_push(address, quick, slow, pool)
        assert quick.policy == "sync"
        assert ctl(capsys, "--ps", address, "policy", "set", "async")["policy"] == "async"
        until(
            lambda: (quick.policy, slow.policy) == ("async", "async"),
            "the new policy at both workers",
        )
        assert push.result(DEADLINE).status == "applied"  # the waiting push is decided at once
        count(quick, 5)
        assert (status(address)["policy"], status(address)["version"]) == ("async", 6)

        ctl(capsys, "--ps", address, "policy", "set", "sync")
        push = waiting_push(address, quick, slow, pool)
        count(slow)
        assert push.result(DEADLINE).version == 7
        together(lambda: count(quick, 3), lambda: count(slow, 3))

        assert (
            status(address)["policy"],
            status(address)["version"],
            status(address)["steps"],
        ) == ("sync", 10, 14)
        assert counted(quick.pull()) == 10


def test_ssp_counts_from_the_current_clocks(cluster: Make, capsys: Output) -> None:
    """The lead of a fast worker under async is dropped, and the bound applies from then on."""
    address = cluster(1, policy="async", min_workers=2).address
    with ThreadPoolExecutor(1) as pool, counter(address, 0) as quick, counter(address, 1) as slow:
        count(quick, 9)
        ctl(
            capsys, "--ps", address, "policy", "set", "ssp", "--staleness", 2, "--max-staleness", 50
        )
        count(quick, 2)
        push = waiting_push(address, quick, slow, pool)

        assert [row["clock"] for row in status(address)["workers"]] == [11, 9]
        assert (status(address)["staleness"], status(address)["max_staleness"]) == (2, 50)
        count(slow)
        assert push.result(DEADLINE).status == "applied"


def test_a_change_to_sync_includes_the_backup_workers(cluster: Make, capsys: Output) -> None:
    address = cluster(1, min_workers=2, backup_workers=1).address
    with counter(address, 0) as quick, counter(address, 1):
        for name in ("async", "sync"):
            ctl(capsys, "--ps", address, "policy", "set", name)
        for version in range(1, 4):
            assert quick.push_pull(ONES).version == version

    assert status(address)["backup_workers"] == 1


def test_an_invalid_policy_is_refused_and_the_old_one_stays(cluster: Make, capsys: Output) -> None:
    address = cluster(1, policy="async", in_flight=1000).address  # a push has 960 bytes
    with counter(address, 0, lanes="grpc") as one, counter(address, 1, lanes="grpc"):
        assert ps_ctl(["--ps", address, "policy", "set", "sync"]) == 2
        assert "`--in-flight 1920`" in capsys.readouterr().err
        with (
            CoordinatorClient([address], 10.0) as servers,
            pytest.raises(InvalidRequestError, match="needs a bound"),
        ):
            servers.set_policy("ssp", None, None)

        count(one, 3)
    assert status(address)["policy"] == "async"


# ---- health --------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_slow_worker_is_found_by_its_own_part_of_the_steps(
    cluster: Make, capsys: Output, caplog: pytest.LogCaptureFixture
) -> None:
    """In sync all workers take the same time from push to push."""
    caplog.set_level(logging.WARNING, "psserver")
    address = cluster(2, min_workers=3, lease=30.0).address
    named = Event()

    def train_at(pace: float, rank: int) -> int:
        with counter(address, rank) as client:
            while not named.is_set():
                count(client)
                Event().wait(pace)  # the worker's own part of the step
            return client.worker

    def look_up() -> list[dict[str, Any]]:
        try:
            until(lambda: "worker_slow" in events(caplog), "a line that names it")
            return list(ctl(capsys, "--ps", address, "workers"))
        finally:
            named.set()

    with ThreadPoolExecutor(3) as pool:
        workers = [pool.submit(train_at, pace, rank) for rank, pace in enumerate((0.05, 0.05, 0.5))]
        rows = {row["rank"]: row for row in look_up()}
        slow = workers[2].result(DEADLINE)

    assert [rows[rank]["health"] for rank in range(3)] == ["live", "live", "slow"]
    assert rows[2]["own_seconds"] > 2 * rows[0]["own_seconds"]
    (record,) = records_of(caplog, "worker_slow")
    assert (record.__dict__["worker"], record.__dict__["rank"]) == (slow, 2)
    assert record.__dict__["step_seconds"] > 2 * record.__dict__["median_seconds"]


def test_a_silent_worker_is_shown_as_silent_before_it_is_lost(cluster: Make) -> None:
    address = cluster(1, lease=OUTLIVED).address
    with counter(address, 0) as client, closing(open_channel(Endpoint(address))) as channel:
        stub = CoordinatorServiceStub(channel)
        joined = stub.Join(co.JoinRequest(format=3), timeout=10)
        worker = joined.worker
        model = codec.model_to_proto(client.plan.spec)
        register = co.RegisterRequest(worker=worker, model=model)
        stub.Register(register, timeout=10, metadata=sent_by(joined.key))
        assert row_of(address, worker)["health"] == "live"

        until(lambda: row_of(address, worker)["health"] == "silent", "one that is silent")
        assert row_of(address, worker)["state"] == "active"
        until(lambda: row_of(address, worker)["health"] == "lost", "one that is lost")

        assert row_of(address, client.worker)["health"] == "live"
    assert row_of(address, client.worker)["health"] == "left"
    assert counted(weights_of(address)) == 0
