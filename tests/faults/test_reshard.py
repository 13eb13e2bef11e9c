"""Reshards of real processes while servers are killed; under sync the weights do not change.

`python -m tests.faults.test_reshard 50` runs 50 seeds with other times of the kills.
"""

import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from pscommon.core.errors import PSError
from psworker.ctl.job_client import CoordinatorClient
from tests.support.compared_runs import (
    EPOCHS,
    FLAGS,
    LOG,
    PAUSE,
    WAIT,
    WORKERS,
    check_data,
    digest_without_kills,
)
from tests.support.forked_job import ForkedJob
from tests.support.worker_scripts import count, train
from tests.support.workers import counted, digest, status, weights_of

SECONDS = 60
DONE = "done"


class ReshardRequester:
    """Requests a number of servers as ps-ctl does until the job has it, across server crashes."""

    def __init__(self, job: ForkedJob, shards: int) -> None:
        self.shards = shards
        self.done = False
        self._job = job
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        """Read the outcome of a lost answer from the status."""
        while not (self.done or self._stopping.is_set()):
            try:
                with CoordinatorClient([self._job.address.split(",")[0]], 2.0) as servers:
                    found = servers.status()
                    if len(found["servers"]) == self.shards and found["moving_to"] is None:
                        self.done = True
                    elif found["moving_to"] is None:
                        servers.reshard(self.shards, 20.0)
            except PSError as error:
                print("mover:", error, flush=True)
                self._stopping.wait(0.05)


def reshard_with_kills(job: ForkedJob, shards: int, *kills: tuple[str, float]) -> None:
    """Reshard to this number of servers; kill each victim after its delay and restart it."""
    began = time.monotonic()
    pending = sorted(kills, key=lambda kill: -kill[1])

    def kill_due() -> None:
        while pending and time.monotonic() >= began + pending[-1][1]:
            life = job.processes[pending.pop()[0]]
            if life.exit_code is None:
                life.kill()

    with ReshardRequester(job, shards) as requester:
        job.supervise(lambda: requester.done and not pending, SECONDS, kill_due)


def has_version(job: ForkedJob, version: int) -> Callable[[], bool]:
    return lambda: _version(job) >= version


def _version(job: ForkedJob) -> int:
    try:
        return int(status(job.address.split(",")[0])["version"])
    except (PSError, AssertionError):
        return -1


def digest_with_kills(folder: Path, seed: int, apart: int, kills: int) -> str:
    """Return the digest of a run that reshards from 2 servers to 3, then to 1, with kills.

    The reshards start `apart` versions after each other.
    """
    folder.mkdir()
    draw = random.Random(seed)
    pause = {"pause_at": 90, "until": folder / DONE}
    with ForkedJob(
        folder, 2, [*FLAGS, *LOG, *WAIT], train, epochs=EPOCHS, pause=PAUSE, **pause
    ) as job:
        job.start_all(WORKERS)
        job.supervise(has_version(job, 10), SECONDS)
        job.add_servers(3)
        for number, shards in enumerate([3, 1]):
            job.supervise(has_version(job, 10 + number * apart), SECONDS)
            reshard_with_kills(
                job,
                shards,
                *((draw.choice(["s0", "s1", "s2"]), draw.random() * 0.4) for _ in range(kills)),
            )
        (folder / DONE).touch()
        job.supervise(job.workers_done, SECONDS)
        check_data(job)
        return digest(job.address.split(",")[0])


@pytest.mark.parametrize(
    ("apart", "kills"), [(15, 1), (0, 3)], ids=["one by one", "again and again"]
)
def test_server_kills_during_reshards_do_not_change_the_weights(
    tmp_path: Path, apart: int, kills: int
) -> None:
    """Consecutive reshards and repeated restarts continue from the same version."""
    assert digest_with_kills(tmp_path / "moved", 1, apart, kills) == digest_without_kills(
        tmp_path / "still"
    )


@pytest.mark.parametrize("victim", ["s0", "s1"])
def test_without_a_log_all_shards_roll_back_together_and_reshard(
    tmp_path: Path, victim: str
) -> None:
    """The state of a killed server is lost; no shard waits for its partition."""
    with ForkedJob(tmp_path, 2, [*FLAGS, *WAIT], train, epochs=EPOCHS, pause=PAUSE) as job:
        job.start_all(WORKERS)
        job.supervise(has_version(job, 25), SECONDS)
        job.add_servers(3)
        reshard_with_kills(job, 3, (victim, 0.1))
        job.supervise(job.workers_done, SECONDS)
        job_status = status(job.address.split(",")[0])
        assert (len(job_status["servers"]), job_status["data"][0]["ended"]) == (3, True)
        check_data(job)
        digest(job.address.split(",")[0])


def test_async_pushes_count_once_during_reshards_over_both_lanes(tmp_path: Path) -> None:
    flags = ("--policy", "async", "--min-workers", 2, *LOG)
    with ForkedJob(tmp_path, 2, flags, count, pushes=400, lanes=("grpc", "shm"), pause=0.01) as job:
        job.start_all(2)
        job.supervise(has_version(job, 20), SECONDS)
        job.add_servers(3)
        reshard_with_kills(job, 3, ("s1", 0.1))
        reshard_with_kills(job, 1, ("s2", 0.1))
        job.supervise(job.workers_done, SECONDS)
        first = job.address.split(",")[0]
        assert counted(weights_of(first)) == status(first)["version"] == 800
        assert "fenced 0" in job.all_logs()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder_name:
        wanted = digest_without_kills(Path(folder_name) / "still")
        for number in range(int(sys.argv[1])):
            found = digest_with_kills(
                Path(folder_name) / str(number), number, *([15, 1] if number % 2 else [0, 3])
            )
            print(
                f"seed {number}: {'the same bits' if found == wanted else 'OTHER BITS'}", flush=True
            )
