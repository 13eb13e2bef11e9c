"""Contender: a paramserver job with server and worker processes that exchange concurrently.

Args: KIND SETUP; KIND names the module of the workers: exchange, arrays, modules, crowd or
training.
"""

import os
import sys
from contextlib import ExitStack

from benchmarks import processes, product
from benchmarks.setup import Setup
from benchmarks.speaker import Command, Measurements, Speaker, Team, serve


class Job:
    """Servers and workers for as long as `resources` lasts."""

    def __init__(self, kind: str, setup: Setup, resources: ExitStack) -> None:
        self.setup = setup
        address = resources.enter_context(product.servers(setup))
        self.servers = processes.descendants(os.getpid(), "psserver")
        self._idle = sum(processes.memory_bytes(pid)["now"] for pid in self.servers)
        module = f"benchmarks.contenders.{kind}"
        commands = [
            Command(module, (setup.to_json(), address, str(rank))) for rank in range(setup.workers)
        ]
        self.team = Team([resources.enter_context(Speaker(command)) for command in commands])

    def turn(self) -> Measurements:
        """One turn of all workers, and what all servers together used meanwhile.

        server_cpu: seconds a push. server_memory: bytes at the peak, beyond those of servers
        without a model, and without server_shared, the workers' memory that servers see through
        /dev/shm.
        """
        for pid in self.servers:
            processes.forget_peak(pid)
        before = processes.cpu_seconds(self.servers)
        measured = self.team.go()
        spent = processes.cpu_seconds(self.servers) - before
        memory = [processes.memory_bytes(pid) for pid in self.servers]
        shared = sum(each["shared"] for each in memory)
        return {
            **measured,
            "server_cpu": spent / (measured["count"] * self.setup.workers * self.setup.clients),
            "server_memory": sum(each["peak"] for each in memory) - shared - self._idle,
            "server_shared": shared,
        }


def main(kind: str, setup: Setup) -> None:
    with ExitStack() as resources:
        serve({"go": Job(kind, setup, resources).turn})


if __name__ == "__main__":
    main(sys.argv[1], Setup.from_json(sys.argv[2]))
