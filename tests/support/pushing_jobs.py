"""Jobs behind proxies whose workers push ones for ever."""

from contextlib import ExitStack
from pathlib import Path

from tests.support.forked_job import Life
from tests.support.proxied_job import ProxiedJob, heard, lines
from tests.support.worker_scripts import count
from tests.support.workers import counted, status, weights_of

NOTICED = 4.0
"""A peer that has vanished is spoken of after so many seconds."""
RESUMED = 3.0
"""After the healing, workers push again after so many seconds."""
LINE = 10.0
"""Nobody waits so long without a line."""

PUSHES = 10**6  # for ever
WORKERS = ("w0", "w1")


class Jobs:
    """Starts them, with two workers each, in a folder, and ends them with the stack."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack

    def __call__(self, policy: str, lease: str, shards: int = 2) -> ProxiedJob:
        """Returns once they train."""
        folder = self._folder / lease
        folder.mkdir()
        flags = ("--policy", policy, "--lease", lease, "--min-workers", 2, "--durability", "log")
        job = self._stack.enter_context(
            ProxiedJob(folder, shards, flags, count, pushes=PUSHES, pause=0.02)
        )
        job.start_all(len(WORKERS))
        for life in workers(job):
            heard(life, "pushed", 20)
        return job


def workers(job: ProxiedJob) -> list[Life]:
    return [job.lives[name] for name in WORKERS]


def finish(job: ProxiedJob, fenced: int = 0) -> int:
    """Ends the workers and checks that what was acknowledged is what has counted, but for pushes
    whose workers were told that the job went on without them, or were killed here before they
    could say; returns how many updates."""
    for life in workers(job):
        life.kill()
    found = status(job.address)
    acknowledged = sum(len(lines(life, "pushed")) for life in workers(job))
    assert acknowledged <= found["steps"] <= acknowledged + len(WORKERS) + fenced
    version = int(found["version"])
    assert version <= counted(weights_of(job.address)) <= version + len(WORKERS)
    return version
