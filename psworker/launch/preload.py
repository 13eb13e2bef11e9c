"""A server that is started ahead, so that one that has to be started again need not load
anything first.
"""

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

from psworker.launch.processes import spawn


class PreloadedServer:
    """Make it in the main thread, as a Process. command: of what reads its arguments from stdin,
    as psserver.preload.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = spawn(command, environment, subprocess.PIPE)

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self, arguments: Sequence[str]) -> "subprocess.Popen[bytes] | None":
        """The process, a server with this command line from now on; None: it has ended
        meanwhile.
        """
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
        """Nobody needs it."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with suppress(OSError):  # what it did not read any more
                    pipe.close()
