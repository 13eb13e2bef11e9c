"""Start the ranks of a group: `python -m psworker.launch.group RANKS COMMAND...`.

Each rank gets the variables that torchrun gives. When one ends with an error, the others are ended
too. The exit code is that of the rank that failed first.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from pscommon.core.exit_codes import ExitCode
from psworker.launch.orphan_guard import spawn

POLL_SECONDS = 0.05
GRACE_SECONDS = 3.0
"""Time that the other ranks get to end by themselves: with their own message."""

Processes = Sequence["subprocess.Popen[bytes]"]


def environment(rank: int, size: int) -> dict[str, str]:
    """Return the environment of a rank; ps-worker chooses the address of the process group."""
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "TORCHELASTIC_RUN_ID": str(os.getpid()),
    }


def main(size: int, command: Sequence[str]) -> int:
    """Run the ranks to their end and return the exit code."""
    processes = [spawn(command, environment(rank, size)) for rank in range(size)]

    def forward(number: int, _: FrameType | None) -> None:
        for process in processes:
            process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCONT):
        signal.signal(number, forward)
    return _wait(processes)


def _wait(processes: Processes) -> int:
    while all(process.poll() in (None, 0) for process in processes):
        if all(process.poll() == 0 for process in processes):
            return ExitCode.DONE
        time.sleep(POLL_SECONDS)
    failed = [code for process in processes if (code := process.poll())]
    deadline = time.monotonic() + GRACE_SECONDS
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
    # ranks that ended because of another one say so with this code
    causes = [code for code in failed if code != ExitCode.TOO_FEW_WORKERS]
    code = (causes or failed)[0]
    return code if code > 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
