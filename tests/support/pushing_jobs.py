"""Jobs behind proxies whose workers push ones until they are stopped."""

from contextlib import ExitStack
from pathlib import Path

from tests.support.forked_job import JobProcess
from tests.support.proxied_job import ProxiedJob, lines, wait_for_line
from tests.support.worker_scripts import count
from tests.support.workers import counted, status, weights_of

DETECTION_SECONDS = 4.0
"""Seconds within which an unreachable peer is logged."""
RECOVERY_SECONDS = 3.0
"""Seconds within which workers push again after a cut."""
LOG_INTERVAL_SECONDS = 10.0
"""Longest time that a process waits without a log line."""

PUSHES = 10**6  # more than any test runs
WORKERS = ("w0", "w1")


class JobStarter:
    """Starts jobs with two workers each in a folder; the exit stack ends them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack

    def __call__(
        self,
        policy: str,
        lease: str,
        shards: int = 2,
        lanes: tuple[str, str] = ("stream", "grpc"),
        server_lanes: str = "auto",
    ) -> ProxiedJob:
        """Start a job and return it when its workers train.

        lanes: --lanes of each worker.
        server_lanes: --lanes of the servers.
        """
        folder = self._folder / lease
        folder.mkdir()
        flags = ("--policy", policy, "--lease", lease, "--min-workers", 2, "--durability", "log")
        flags = (*flags, "--lanes", server_lanes)
        job = self._stack.enter_context(
            ProxiedJob(folder, shards, flags, count, pushes=PUSHES, pause=0.02, lanes=lanes)
        )
        job.start_all(len(WORKERS))
        for process in workers(job):
            wait_for_line(process, "pushed", 20)
        return job


def workers(job: ProxiedJob) -> list[JobProcess]:
    return [job.processes[name] for name in WORKERS]


def stop_and_check(job: ProxiedJob, fenced: int = 0) -> int:
    """Kill the workers and check that acknowledged pushes have counted; return the version.

    Pushes may count unacknowledged if their worker was fenced or killed before it printed them.
    """
    for process in workers(job):
        process.kill()
    found = status(job.address)
    acknowledged = sum(len(lines(process, "pushed")) for process in workers(job))
    assert acknowledged <= found["steps"] <= acknowledged + len(WORKERS) + fenced
    version = int(found["version"])
    assert version <= counted(weights_of(job.address)) <= version + len(WORKERS)
    return version
