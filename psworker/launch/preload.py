"""Preloaded server: a process that has imported everything before it is needed."""

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

from psworker.launch.processes import spawn


class PreloadedServer:
    """Process that waits for the arguments of a server on stdin."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the process, like psserver.preload; call this from the main thread."""
        self._process = spawn(command, environment, subprocess.PIPE)

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    def begin(self, arguments: Sequence[str]) -> "subprocess.Popen[bytes] | None":
        """Turn the process into a server with these arguments; None if it has ended."""
        stdin = self._process.stdin
        try:
            assert stdin is not None
            stdin.write(json.dumps([*arguments]).encode() + b"\n")
            stdin.close()
        except OSError:
            self.end()
            return None
        return self._process

    def end(self) -> None:
        """Kill the process."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with suppress(OSError):  # closing flushes data that the process did not read
                    pipe.close()
