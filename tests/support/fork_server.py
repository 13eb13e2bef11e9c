"""Processes forked from one process that has imported all modules.

A new interpreter takes seconds to import torch; a forked process starts in milliseconds.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "psserver.app",
        "psserver.cli",
        "psworker.cli",
        "psworker.connect",
        "tests.support.worker_scripts",
        "tests.support.fork_server_preload",
    ]
)


class Forked:
    """The counterpart of subprocess.Popen for a forked command or script.

    command: ps-server, ps-worker, or python with a script's path.
    environment: the complete environment.
    """

    def __init__(
        self, command: str, arguments: Sequence[str], cwd: Path, environment: Mapping[str, str]
    ) -> None:
        pipes = [CONTEXT.Pipe(duplex=False) for _ in range(2)]
        writers = [writer for _, writer in pipes]
        body = (command, list(arguments), str(cwd), dict(environment), *writers)
        self._process = CONTEXT.Process(target=run_forked, args=body, name=command, daemon=True)
        self._process.start()
        for writer in writers:
            writer.close()
        self.stdout, self.stderr = (
            os.fdopen(os.dup(reader.fileno()), encoding="utf-8") for reader, _ in pipes
        )
        for reader, _ in pipes:
            reader.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        return self._process.exitcode

    def wait(self, seconds: float | None = None) -> int:
        """Return the exit code; raise subprocess.TimeoutExpired as Popen does."""
        self._process.join(seconds)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(self._process.name, seconds or 0.0)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal unless the process has exited."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_forked(
    command: str,
    arguments: list[str],
    cwd: str,
    environment: dict[str, str],
    out: Connection,
    err: Connection,
) -> None:
    """Run a command in the forked process with this folder, environment and output."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    out.close(), err.close()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.path.insert(0, cwd)  # an interpreter prepends the folder of its script in the same way
    sys.exit(_run(command, arguments))


def _run(command: str, arguments: list[str]) -> int:
    match command:
        case "ps-server":
            from psserver import cli as server

            return server.main(arguments)
        case "ps-worker":
            from psworker import cli as worker

            return worker.main(arguments)
        case "python":
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
            return 0
    raise ValueError(f"{command} cannot be forked")
