"""Another number of servers while somebody is killed: real processes, and in sync not a bit
differs.

python -m tests.faults.test_reshard 50     kills at so many other moments
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
    undisturbed,
)
from tests.support.forked_job import ForkedJob
from tests.support.worker_scripts import count, train
from tests.support.workers import counted, digest, status, weights_of

SECONDS = 60
DONE = "done"


class Mover:
    """Asks for another number of servers, as ps-ctl does, until there are so many, whoever dies
    meanwhile.
    """

    def __init__(self, job: ForkedJob, shards: int) -> None:
        self.shards = shards
        self.done = False
        self._job = job
        self._over = threading.Event()
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
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        """Whether it was done when the answer was lost, the status says."""
        while not (self.done or self._over.is_set()):
            try:
                with CoordinatorClient([self._job.address.split(",")[0]], 2.0) as servers:
                    found = servers.status()
                    if len(found["servers"]) == self.shards and found["moving_to"] is None:
                        self.done = True
                    elif found["moving_to"] is None:
                        servers.reshard(self.shards, 20.0)
            except PSError as error:
                print("mover:", error, flush=True)
                self._over.wait(0.05)


def move(job: ForkedJob, shards: int, *kills: tuple[str, float]) -> None:
    """To so many servers; victims are killed so many seconds after that was begun, and started
    again.
    """
    began = time.monotonic()
    left = sorted(kills, key=lambda kill: -kill[1])

    def kill() -> None:
        while left and time.monotonic() >= began + left[-1][1]:
            life = job.lives[left.pop()[0]]
            if life.ended is None:
                life.kill()

    with Mover(job, shards) as mover:
        job.tend(lambda: mover.done and not left, SECONDS, kill)


def trained(job: ForkedJob, version: int) -> Callable[[], bool]:
    return lambda: _version(job) >= version


def _version(job: ForkedJob) -> int:
    try:
        return int(status(job.address.split(",")[0])["version"])
    except (PSError, AssertionError):
        return -1


def disturbed(folder: Path, seed: int, apart: int, kills: int) -> str:
    """The digest of a run in which 2 servers become 3, then 1, so many versions apart, with
    kills in each move.
    """
    folder.mkdir()
    draw = random.Random(seed)
    held = {"held_at": 90, "until": folder / DONE}
    with ForkedJob(
        folder, 2, [*FLAGS, *LOG, *WAIT], train, epochs=EPOCHS, pause=PAUSE, **held
    ) as job:
        job.start_all(WORKERS)
        job.tend(trained(job, 10), SECONDS)
        job.add_servers(3)
        for number, shards in enumerate([3, 1]):
            job.tend(trained(job, 10 + number * apart), SECONDS)
            move(
                job,
                shards,
                *((draw.choice(["s0", "s1", "s2"]), draw.random() * 0.4) for _ in range(kills)),
            )
        (folder / DONE).touch()
        job.tend(job.workers_done, SECONDS)
        check_data(job)
        return digest(job.address.split(",")[0])


@pytest.mark.parametrize(
    ("apart", "kills"), [(15, 1), (0, 3)], ids=["one by one", "again and again"]
)
def test_servers_that_are_killed_in_a_move_change_no_bit(
    tmp_path: Path, apart: int, kills: int
) -> None:
    """Moves that follow one another at once go on from the same version, and so do servers that
    are started twice.
    """
    assert disturbed(tmp_path / "moved", 1, apart, kills) == undisturbed(tmp_path / "still")


@pytest.mark.parametrize("victim", ["s0", "s1"])
def test_without_a_log_all_go_back_together_to_the_new_number_of_servers(
    tmp_path: Path, victim: str
) -> None:
    """A server that dies takes what it had with it; nobody waits for a part that will not come."""
    with ForkedJob(tmp_path, 2, [*FLAGS, *WAIT], train, epochs=EPOCHS, pause=PAUSE) as job:
        job.start_all(WORKERS)
        job.tend(trained(job, 25), SECONDS)
        job.add_servers(3)
        move(job, 3, (victim, 0.1))
        job.tend(job.workers_done, SECONDS)
        told = status(job.address.split(",")[0])
        assert (len(told["servers"]), told["data"][0]["ended"]) == (3, True)
        check_data(job)
        digest(job.address.split(",")[0])


def test_nothing_is_lost_or_repeated_in_async_over_both_lanes(tmp_path: Path) -> None:
    flags = ("--policy", "async", "--min-workers", 2, *LOG)
    with ForkedJob(tmp_path, 2, flags, count, pushes=400, lanes=("grpc", "shm"), pause=0.01) as job:
        job.start_all(2)
        job.tend(trained(job, 20), SECONDS)
        job.add_servers(3)
        move(job, 3, ("s1", 0.1))
        move(job, 1, ("s2", 0.1))
        job.tend(job.workers_done, SECONDS)
        first = job.address.split(",")[0]
        assert counted(weights_of(first)) == status(first)["version"] == 800
        assert "fenced 0" in job.said()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        wanted = undisturbed(Path(place) / "still")
        for number in range(int(sys.argv[1])):
            found = disturbed(
                Path(place) / str(number), number, *([15, 1] if number % 2 else [0, 3])
            )
            print(
                f"seed {number}: {'the same bits' if found == wanted else 'OTHER BITS'}", flush=True
            )
