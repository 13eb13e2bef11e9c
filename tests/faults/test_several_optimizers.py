"""Killed servers and workers of a job with several optimizers."""

from pathlib import Path

from tests.support.compared_runs import LOG, SECONDS, WAIT, WORKERS
from tests.support.forked_job import ForkedJob
from tests.support.killer import DONE, Killer
from tests.support.small_gan import BATCH, SAMPLES
from tests.support.worker_scripts import GAN_EPOCHS, train_gan
from tests.support.workers import digest, status

FLAGS = ("--min-workers", WORKERS, "--lease", "2s", "--snapshot-every", "21steps")
KILLS, DEATHS, PAUSE_AT = 12, 4, 100
BATCHES = GAN_EPOCHS * SAMPLES // BATCH


class ServerKiller(Killer):
    """Kills servers at random, and asks a worker again and again to die after its next batch."""

    def __init__(self, job: ForkedJob, seed: int, death: Path) -> None:
        super().__init__(job, seed, KILLS, kinds="s")
        self._death = death
        self.deaths_left = DEATHS

    def __call__(self) -> None:
        if self.deaths_left and self.left <= 3 * self.deaths_left and not self._death.exists():
            self._death.touch()
            self.deaths_left -= 1
        if self.left > 1 or not (self.deaths_left or self._death.exists()):
            super().__call__()


def run(folder: Path, killer_seed: int | None = None, **options: object) -> str:
    """Return the digest of a run; servers and a worker are killed if there is a seed."""
    folder.mkdir()
    death = folder / "death"
    options |= {"death": death, "dies_within_batch": False}
    with ForkedJob(folder, 2, [*FLAGS, *LOG, *WAIT], train_gan, **options) as job:
        job.start_all(WORKERS)
        killer = None if killer_seed is None else ServerKiller(job, killer_seed, death)
        job.supervise(job.workers_done, SECONDS, killer or (lambda: None))

        if killer is not None:
            assert killer.left == killer.deaths_left == 0
            assert job.processes["w0"].attempt == DEATHS
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


def test_kills_do_not_change_the_weights(tmp_path: Path) -> None:
    """A worker dies between batches only; see the next test."""
    pause = {"pause": 0.03, "pause_at": PAUSE_AT, "until": tmp_path / "disturbed" / DONE}

    assert run(tmp_path / "disturbed", 3, **pause) == run(tmp_path / "quiet")


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
