"""Servers on this machine for as long as a `with` lasts: processes that leave nothing behind."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from pscommon.core.errors import PSError, UnreachableError, error_for
from pscommon.core.exit_codes import ExitCode
from psworker.launch import orphan_guard as tether

START_SECONDS = 60.0
STOP_SECONDS = 10.0
POLL_SECONDS = 0.02
TAIL = 2000


class LocalServers:
    """`count` shards on free ports of 127.0.0.1. address: of shard 0, inside the `with`.
    environ: what they inherit.

    Raises UnreachableError, with the end of the server's log, where one does not come up.
    """

    def __init__(
        self,
        count: int,
        min_workers: int,
        policy: str,
        staleness: int | None,
        environ: Mapping[str, str],
    ) -> None:
        self.address = ""
        self._count = count
        self._environ = environ
        self._flags = [
            "--policy",
            policy,
            "--min-workers",
            str(min_workers),
            "--log-format",
            "text",
        ]
        if staleness is not None:
            self._flags += ["--staleness", str(staleness)]
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "LocalServers":
        try:
            # only for the start: whatever ends this process later, SIGTERM say, leaves no folder
            with tempfile.TemporaryDirectory(prefix="paramserver-") as folder:
                for shard in range(self._count):
                    address = self._start(shard, Path(folder))
                    self.address = self.address or address
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def _start(self, shard: int, folder: Path) -> str:
        port_file, log = folder / f"{shard}.port", folder / f"{shard}.log"
        command = [sys.executable, "-P", "-m", "psserver", "--shard", f"{shard}/{self._count}"]
        command += ["--bind", "127.0.0.1:0", "--port-file", str(port_file), *self._flags]
        if shard > 0:
            command += ["--join", self.address]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environ,
                start_new_session=True,
            )
        self._processes.append(process)
        deadline = time.monotonic() + START_SECONDS
        while not port_file.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise self._failure(shard, process, log)
            time.sleep(POLL_SECONDS)
        return f"127.0.0.1:{port_file.read_text().strip()}"

    def _failure(self, shard: int, process: "subprocess.Popen[bytes]", log: Path) -> PSError:
        end = log.read_text(errors="replace")[-TAIL:].strip()
        if process.poll() == ExitCode.USAGE:
            return error_for("INVALID_REQUEST", end)
        return UnreachableError(
            f"the server of shard {shard} did not start (exit code {process.poll()}):\n{end}"
        )

    def _stop(self) -> None:
        """Shard 0 last: the others wait for its word that the job is over."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
