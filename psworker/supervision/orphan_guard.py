"""Run a command that is killed when its parent process ends, even by SIGKILL.

Runs as a file in a bare interpreter: `python -I -S orphan_guard.py PARENT COMMAND...`. On Linux
the kernel sends the signal, and the command replaces this process. On other systems this process
stays and polls.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

PR_SET_PDEATHSIG = 1
POLL_SECONDS = 0.2


def spawn(
    command: Sequence[str], environment: Mapping[str, str], **streams: Any
) -> "subprocess.Popen[bytes]":
    """Start a guarded process in its own session; on Linux it ends with the calling thread.

    Call this from the main thread. streams: `stdin`, `stdout` and `stderr` as of Popen.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command],
        env=dict(environment),
        start_new_session=True,
        **streams,
    )


def main(parent: int, command: list[str], *, watch: bool = sys.platform != "linux") -> int:
    """Replace this process with the command, or watch it and return its exit code."""
    if watch:
        return watch_child(parent, command)
    end_with_parent(parent)
    return os.execvp(command[0], command)


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the parent's thread that started it ends (Linux)."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before prctl
        os._exit(128 + signal.SIGTERM)


def watch_child(parent: int, command: list[str]) -> int:
    """Run the command as a child; forward SIGTERM, and kill the group when the parent ends."""
    child = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    while child.poll() is None:
        if os.getppid() != parent:
            os.killpg(0, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    return child.returncode if child.returncode >= 0 else _end_by_signal(-child.returncode)


def _end_by_signal(number: int) -> int:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
