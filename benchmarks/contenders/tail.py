"""Contender: how long one worker's pulls take, words "idle" and "busy": while another pushes
without pause.

Args: SETUP [ROLE ADDRESS], ROLE "pull" or "push"; SETUP's pieces are pulls a turn. The policy is
async: pushes do not wait for other workers.
"""

import sys
import threading
import time
from contextlib import ExitStack

from benchmarks import product
from benchmarks.contenders.exchange import Worker
from benchmarks.sample import sample
from benchmarks.setup import Setup
from benchmarks.speaker import Command, Measurements, Speaker, serve
from pscommon.system.process_limits import tune_malloc


class Pusher:
    """Pushes between `start` and `stop`."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._thread: threading.Thread | None = None
        self._wanted = threading.Event()
        self._pushes, self._began = 0, 0.0

    def start(self) -> Measurements:
        self._pushes, self._began = 0, time.perf_counter()
        self._wanted.set()
        self._thread = threading.Thread(target=self._push)
        self._thread.start()
        return {}

    def stop(self) -> Measurements:
        self._wanted.clear()
        assert self._thread is not None
        self._thread.join()
        return {"pushes_per_second": self._pushes / (time.perf_counter() - self._began)}

    def _push(self) -> None:
        while self._wanted.is_set():
            self._worker.push()
            self._pushes += 1


def member(setup: Setup, role: str, address: str) -> None:
    tune_malloc()
    worker = Worker(setup, address, int(role == "push"))

    def pulls() -> Measurements:
        seconds = sample([worker.pull() for _ in range(setup.pieces)])
        return {"seconds": seconds.median, "p99": seconds.quantile(0.99), "count": setup.pieces}

    with worker.client:
        if role == "pull":
            serve({"pull": pulls}, 1)
        else:
            pusher = Pusher(worker)
            serve({"start": pusher.start, "stop": pusher.stop}, 1)


def main(setup: Setup) -> None:
    with ExitStack() as resources:
        address = resources.enter_context(product.servers(setup))
        args = [(setup.to_json(), role, address) for role in ("pull", "push")]
        puller, pusher = (
            resources.enter_context(Speaker(Command("benchmarks.contenders.tail", each)))
            for each in args
        )
        puller.wait_until_ready()
        pusher.wait_until_ready()

        def busy() -> Measurements:
            pusher.ask("start")
            measured = puller.ask("pull")
            return {**measured, **pusher.ask("stop")}

        serve({"idle": lambda: puller.ask("pull"), "busy": busy})


if __name__ == "__main__":
    if len(sys.argv) > 2:
        member(Setup.from_json(sys.argv[1]), sys.argv[2], sys.argv[3])
    else:
        main(Setup.from_json(sys.argv[1]))
