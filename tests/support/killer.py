"""Kills of processes at random times."""

import random
import time

from tests.support.forked_job import ForkedJob

DONE = "done"
"""Name of the file that the last kill creates in the job's folder."""


class Killer:
    """Kills processes of a job at random times. `kinds`: s for servers, w for workers.

    The last steps of the workers follow the last kill (pause_at).
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
        names = [name for name in self._job.running_names if name[0] in self._kinds]
        if self.left and names and time.monotonic() > self._next:
            self._job.processes[self._random.choice(names)].kill()
            self.left -= 1
            self._next = time.monotonic() + self._random.random() * self._gap
            if not self.left:
                self._done.touch()
