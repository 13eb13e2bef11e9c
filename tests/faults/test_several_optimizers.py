"""Killed servers and workers of a job with several optimizers."""

from pathlib import Path

from tests.support.compared_runs import LOG, SECONDS, WAIT, WORKERS
from tests.support.forked_job import ForkedJob
from tests.support.killer import DONE, Killer
from tests.support.small_gan import BATCH, SAMPLES
from tests.support.worker_scripts import GAN_EPOCHS, train_gan
from tests.support.workers import digest, status

FLAGS = ("--min-workers", WORKERS, "--lease", "2s", "--snapshot-every", "21steps")
KILLS, PAUSE_AT = 12, 100
BATCHES = GAN_EPOCHS * SAMPLES // BATCH


def run(folder: Path, killer_seed: int | None, **options: object) -> str:
    """Return the digest of a run; its servers are killed if there is a seed."""
    folder.mkdir()
    with ForkedJob(folder, 2, [*FLAGS, *LOG, *WAIT], train_gan, **options) as job:
        job.start_all(WORKERS)
        killer = Killer(job, killer_seed or 0, KILLS if killer_seed is not None else 0, kinds="s")
        job.supervise(job.workers_done, SECONDS, killer)

        assert killer.left == 0
        check_data(job)
        assert status(job.address)["version"] == BATCHES  # two updates for each pair of batches
        return digest(job.address)


def check_data(job: ForkedJob) -> None:
    """Check that each sample counted exactly once per epoch."""
    job_status = status(job.address)
    (row,) = job_status["data"]
    assert (job_status["samples"], row["dropped"], row["duplicates"]) == (
        SAMPLES * GAN_EPOCHS,
        0,
        0,
    )


def test_killed_servers_do_not_change_the_weights(tmp_path: Path) -> None:
    pause = {"pause": 0.03, "pause_at": PAUSE_AT, "until": tmp_path / "disturbed" / DONE}

    assert run(tmp_path / "disturbed", 3, **pause) == run(tmp_path / "quiet", None)


def test_a_worker_that_dies_between_two_steps_loses_the_second_one(tmp_path: Path) -> None:
    """Its batch counts once, in the first step. The other worker's updates count."""
    death = tmp_path / "death"
    with ForkedJob(tmp_path, 2, [*FLAGS, *LOG, *WAIT], train_gan, death=death, pause=0.01) as job:
        job.start_all(WORKERS)
        job.supervise(lambda: status(job.address)["version"] >= 10, SECONDS)
        death.touch()
        job.supervise(job.workers_done, SECONDS)

        assert not death.exists()
        check_data(job)
        assert status(job.address)["steps"] == 2 * BATCHES - 1
