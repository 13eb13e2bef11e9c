"""Servers on this machine for the duration of a `with` block: processes that leave no files."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from pscommon.core.errors import PSError, UnreachableError, error_for
from pscommon.core.exit_codes import ExitCode
from psworker.launch.orphan_guard import spawn

START_TIMEOUT_SECONDS = 60.0
STOP_TIMEOUT_SECONDS = 10.0
POLL_INTERVAL_SECONDS = 0.02
LOG_TAIL_CHARACTERS = 2000


class LocalServers:
    """Server processes on free ports of 127.0.0.1, to be used in a `with` block.

    Attributes:
        address: Address of shard 0, inside the `with` block.

    Raises:
        UnreachableError: A server does not start; the message has the end of its log.
        InvalidRequestError: A server refuses its settings.
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
            # only during the start: a signal that ends this process later leaves no folder
            with tempfile.TemporaryDirectory(prefix="paramserver-") as folder:
                for shard in range(self._count):
                    address = self._start(shard, Path(folder))
                    self.address = self.address or address
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _start(self, shard: int, folder: Path) -> str:
        port_file, log = folder / f"{shard}.port", folder / f"{shard}.log"
        command = [sys.executable, "-P", "-m", "psserver", "--shard", f"{shard}/{self._count}"]
        command += ["--bind", "127.0.0.1:0", "--port-file", str(port_file), *self._flags]
        if shard > 0:
            command += ["--join", self.address]
        with log.open("wb") as output:
            process = spawn(
                command,
                self._environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._processes.append(process)
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while not port_file.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise self._failure(shard, process, log)
            time.sleep(POLL_INTERVAL_SECONDS)
        return f"127.0.0.1:{port_file.read_text().strip()}"

    def _failure(self, shard: int, process: "subprocess.Popen[bytes]", log: Path) -> PSError:
        end = log.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:].strip()
        if process.poll() == ExitCode.USAGE:
            return error_for("INVALID_REQUEST", end)
        return UnreachableError(
            f"the server of shard {shard} failed to start: exit code {process.poll()}; its log "
            f"ends with:\n{end}"
        )

    def _stop(self) -> None:
        # shard 0 ends last: the others wait for its message that the job has ended
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(STOP_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
