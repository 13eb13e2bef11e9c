"""kill -9 of random servers and workers: no sample is lost, and under sync the weights do not
change.

`python -m tests.faults.test_kills 50` runs 50 seeds.
"""

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
    digest_without_kills,
)
from tests.support.forked_job import ForkedJob
from tests.support.killer import DONE, Killer
from tests.support.worker_scripts import train
from tests.support.workers import digest, status

PAUSE_AT = 90
"""Version at which workers wait for the last kill; a run has at least 100 versions."""


def create_job(folder: Path, *flags: object, **options: object) -> ForkedJob:
    """Create a job that cannot finish before its killer does."""
    pause = {"pause_at": PAUSE_AT, "until": folder / DONE}
    return ForkedJob(
        folder, SHARDS, [*FLAGS, *flags], train, epochs=EPOCHS, pause=PAUSE, **pause, **options
    )


def digest_with_kills(folder: Path, seed: int, kills: int = KILLS, **options: object) -> str:
    """Return the digest of a run with kills; AssertionError unless each sample counted once."""
    folder.mkdir()
    with create_job(folder, *LOG, *WAIT, **options) as job:
        job.start_all(WORKERS)
        killer = Killer(job, seed, kills)
        job.supervise(job.workers_done, SECONDS, killer)

        assert killer.left == 0
        check_data(job)
        return digest(job.address)


def test_kills_do_not_change_the_weights(tmp_path: Path) -> None:
    assert digest_with_kills(tmp_path / "disturbed", seed=0) == digest_without_kills(
        tmp_path / "quiet"
    )


def test_kills_do_not_change_the_weights_of_a_streamed_run(tmp_path: Path) -> None:
    """Each source continues after its last counted sample, whichever worker reads it."""
    quiet = digest_without_kills(tmp_path / "quiet", streamed=True)

    assert digest_with_kills(tmp_path / "disturbed", seed=1, kills=5, streamed=True) == quiet


def test_kills_do_not_change_the_weights_of_a_clipped_run(tmp_path: Path) -> None:
    """Some kills fall between the norm of an update and the update."""
    quiet = digest_without_kills(tmp_path / "quiet", clip_norm=0.3)

    assert quiet != digest_without_kills(tmp_path / "unclipped")
    assert digest_with_kills(tmp_path / "disturbed", seed=2, kills=8, clip_norm=0.3) == quiet


def test_with_shrink_each_sample_counts_exactly_once(tmp_path: Path) -> None:
    """Rounds continue without a killed worker after its lease; its replacement is a new worker."""
    with create_job(tmp_path, *LOG) as job:
        job.start_all(WORKERS)
        killer = Killer(job, 5, kills=10)
        job.supervise(job.workers_done, SECONDS, killer)

        assert killer.left == 0
        check_data(job)


def test_without_a_log_killed_servers_roll_back_together_and_log_it(tmp_path: Path) -> None:
    """At most one snapshot interval is lost. Each sample of the result counts once. Workers are not
    restarted.
    """
    with create_job(tmp_path) as job:
        job.start_all(WORKERS)
        job.supervise(lambda: len(status(job.address)["snapshots"]) > 0, SECONDS)
        killer = Killer(job, 5, kills=4, gap=3.0, kinds="s")
        job.supervise(job.workers_done, SECONDS, killer)

        assert killer.left == 0
        check_data(job)
        assert all(life.attempt == 0 for life in job.all if life.name.startswith("w"))
    assert "updates_lost" in job.all_logs()


def main() -> None:
    """Compare runs with kills to the undisturbed run for each seed."""
    root = Path(tempfile.mkdtemp(prefix="kills-"))
    expected, wrong = digest_without_kills(root / "quiet"), []
    for seed in range(int(sys.argv[1])):
        began = time.monotonic()
        try:
            same = digest_with_kills(root / str(seed), seed) == expected
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
