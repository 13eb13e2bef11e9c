"""Start the ranks of a group: `python -m psworker.supervision.group RANKS COMMAND...`.

Each rank gets the variables that torchrun gives. The output of ranks from 1 on is marked. When one
ends with an error, the others are ended too. The exit code is that of a rank that failed by itself.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import IO, TextIO

from pscommon.core.exit_codes import ExitCode
from psworker.supervision.orphan_guard import spawn

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
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    processes = [spawn(command, environment(rank, size), **pipes) for rank in range(size)]
    readers = [
        threading.Thread(target=_forward, args=(rank, source, target), daemon=True)
        for rank, process in enumerate(processes)
        for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
    ]
    for reader in readers:
        reader.start()

    def forward(number: int, _: FrameType | None) -> None:
        for process in processes:
            process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCONT):
        signal.signal(number, forward)
    code = _wait(processes)
    for reader in readers:  # a process that a rank has left behind may keep its output open
        reader.join(GRACE_SECONDS)
    return code


def _forward(rank: int, source: IO[bytes], target: TextIO) -> None:
    """Write complete lines of a rank, so that lines of several ranks do not mix."""
    prefix = f"[rank {rank}] ".encode() if rank else b""
    for line in source:
        target.buffer.write(prefix + line)
        target.buffer.flush()


def _wait(processes: Processes) -> int:
    while all(process.poll() in (None, 0) for process in processes):
        if all(process.poll() == 0 for process in processes):
            return ExitCode.DONE
        time.sleep(POLL_SECONDS)
    deadline = time.monotonic() + GRACE_SECONDS
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    failed = [code for process in processes if (code := process.poll())]
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
