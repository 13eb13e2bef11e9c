"""kill -9 of servers and workers, real ones, at random: nothing is lost, and in sync not a bit
differs.

python -m tests.faults.test_kills 50     the same with so many seeds
"""

import random
import sys
import tempfile
import time
from pathlib import Path

from tests.support.compared_runs import (
    EPOCHS,
    FLAGS,
    KILLS,
    LOG,
    PAUSE,
    SECONDS,
    SHARDS,
    WAIT,
    WORKERS,
    check_data,
    undisturbed,
)
from tests.support.forked_job import ForkedJob
from tests.support.worker_scripts import train
from tests.support.workers import digest, status

HELD_AT, DONE = 90, "done"
"""Version at which workers wait until the killer is done; a run has at least 100."""


class Killer:
    """kill -9 of somebody, so many times, at random moments. `kinds`: s for servers, w for workers.

    However fast the workers are, they make their last steps when it is done (held_at).
    """

    def __init__(
        self, job: ForkedJob, seed: int, kills: int, gap: float = 0.8, kinds: str = "sw"
    ) -> None:
        self.left = kills
        self._done = job.folder / DONE
        self._job, self._gap, self._kinds = job, gap, kinds
        self._random = random.Random(seed)
        self._next = time.monotonic() + 0.5

    def __call__(self) -> None:
        names = [name for name in self._job.names if name[0] in self._kinds]
        if self.left and names and time.monotonic() > self._next:
            self._job.lives[self._random.choice(names)].kill()
            self.left -= 1
            self._next = time.monotonic() + self._random.random() * self._gap
            if not self.left:
                self._done.touch()


def killed_job(folder: Path, *flags: object, **options: object) -> ForkedJob:
    """A job with something to compute, which is not over before its killer is done."""
    held = {"held_at": HELD_AT, "until": folder / DONE}
    return ForkedJob(
        folder, SHARDS, [*FLAGS, *flags], train, epochs=EPOCHS, pause=PAUSE, **held, **options
    )


def disturbed(folder: Path, seed: int, kills: int = KILLS, **options: object) -> str:
    """The digest of a run with so many kills; AssertionError if not each sample counted once."""
    folder.mkdir()
    with killed_job(folder, *LOG, *WAIT, **options) as job:
        job.start_all(WORKERS)
        killer = Killer(job, seed, kills)
        job.tend(job.workers_done, SECONDS, killer)

        assert killer.left == 0
        check_data(job)
        return digest(job.address)


def test_the_bits_are_those_of_the_undisturbed_run(tmp_path: Path) -> None:
    assert disturbed(tmp_path / "disturbed", seed=0) == undisturbed(tmp_path / "quiet")


def test_the_bits_of_a_stream_are_those_of_the_undisturbed_run(tmp_path: Path) -> None:
    """Each source goes on, under whoever reads it then, after the last sample that counted."""
    quiet = undisturbed(tmp_path / "quiet", streamed=True)

    assert disturbed(tmp_path / "disturbed", seed=1, kills=5, streamed=True) == quiet


def test_the_bits_of_a_clipped_run_are_those_of_the_undisturbed_run(tmp_path: Path) -> None:
    """Kills between the measure of an update and the update itself."""
    quiet = undisturbed(tmp_path / "quiet", clip_norm=0.3)

    assert quiet != undisturbed(tmp_path / "unclipped")
    assert disturbed(tmp_path / "disturbed", seed=2, kills=8, clip_norm=0.3) == quiet


def test_with_shrink_each_sample_counts_exactly_once(tmp_path: Path) -> None:
    """Rounds go on without a killed worker once its lease has ended; who is started in its place
    is new.
    """
    with killed_job(tmp_path, *LOG) as job:
        job.start_all(WORKERS)
        killer = Killer(job, 5, kills=10)
        job.tend(job.workers_done, SECONDS, killer)

        assert killer.left == 0
        check_data(job)


def test_without_a_log_all_shards_go_back_together_and_say_what_was_lost(tmp_path: Path) -> None:
    """At most one interval of snapshots; each sample of what stands in the end counted once;
    nobody is started again but who was killed."""
    with killed_job(tmp_path) as job:
        job.start_all(WORKERS)
        job.tend(lambda: len(status(job.address)["snapshots"]) > 0, SECONDS)
        killer = Killer(job, 5, kills=4, gap=3.0, kinds="s")
        job.tend(job.workers_done, SECONDS, killer)

        assert killer.left == 0
        check_data(job)
        assert all(life.attempt == 0 for life in job.all if life.name.startswith("w"))
    assert "updates_lost" in job.said()


def main() -> None:
    """Compare so many seeds with the undisturbed run."""
    root = Path(tempfile.mkdtemp(prefix="kills-"))
    expected, wrong = undisturbed(root / "quiet"), []
    for seed in range(int(sys.argv[1])):
        began = time.monotonic()
        try:
            same = disturbed(root / str(seed), seed) == expected
        except AssertionError as error:
            same = False
            print(error)
        wrong += [] if same else [seed]
        print(
            f"seed {seed}: {'same bits' if same else 'DIFFERENT'} after {KILLS} kills, "
            f"{time.monotonic() - began:.0f} s"
        )
    sys.exit(f"seeds {wrong} differ; artefacts in {root}" if wrong else 0)


if __name__ == "__main__":
    main()
