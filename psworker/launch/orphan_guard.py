"""Runs a command that ends when the process that started it is gone, even by kill -9.

Run as a file, by an interpreter of its own that loads nothing else: `python -I -S tether.py
PARENT COMMAND...`. On Linux the kernel sends the signal and the command takes this process's
place; elsewhere this process stays and watches.
"""

import os
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
POLL_SECONDS = 0.2


def main(parent: int, command: list[str], *, watch: bool = sys.platform != "linux") -> int:
    """Does not return where the command takes our place; otherwise returns its exit code."""
    if watch:
        return stay(parent, command)
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we could ask
        return 128 + signal.SIGTERM
    return os.execvp(command[0], command)


def stay(parent: int, command: list[str]) -> int:
    """Runs the command as a child, passes SIGTERM on, and kills the whole process group when the
    parent is gone.
    """
    child = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    while child.poll() is None:
        if os.getppid() != parent:
            os.killpg(0, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    return child.returncode if child.returncode >= 0 else _die_alike(-child.returncode)


def _die_alike(number: int) -> int:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
