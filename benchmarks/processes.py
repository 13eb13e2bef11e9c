"""What the kernel knows about processes: CPU seconds and memory, whole families of them. Linux
only.
"""

import os
import time
from collections.abc import Iterable
from pathlib import Path

TICK = 1 / os.sysconf("SC_CLK_TCK")
"""Seconds; the grain of the CPU times of ended processes."""


def family(root: int) -> list[int]:
    """The process and all its descendants that live now."""
    parents = {
        int(entry): _parent(int(entry)) for entry in os.listdir("/proc") if entry.isdecimal()
    }
    found, fresh = [root], {root}
    while fresh:
        fresh = {pid for pid, parent in parents.items() if parent in fresh}
        found += fresh
    return found


def descendants(root: int, word: str) -> list[int]:
    """Those whose command line has `word` among its arguments."""
    return [
        pid
        for pid in family(root)
        if pid != root and word.encode() in _read(pid, "cmdline").split(b"\0")
    ]


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time of these processes, and of their children that have ended."""
    return sum(_own_seconds(pid) + sum(map(int, _fields(pid)[13:15])) * TICK for pid in pids)


def _own_seconds(pid: int) -> float:
    """By the process's CPU clock, in nanoseconds; 0 for a process that has ended. The number of the
    clock is what clock_getcpuclockid(3) returns on Linux.
    """
    try:
        return time.clock_gettime(~pid << 3 | 2)
    except OSError:
        return 0.0


def memory_bytes(pid: int) -> dict[str, int]:
    """Resident memory: "now", "peak" since `forget_peak`, and what of it is "shared" (/dev/shm,
    mapped by others).
    """
    words = {"VmRSS": "now", "VmHWM": "peak", "RssShmem": "shared"}
    lines = dict(
        line.split(":", 1) for line in _read(pid, "status").decode().splitlines() if ":" in line
    )
    return {name: int(lines.get(key, "0 kB").split()[0]) * 1024 for key, name in words.items()}


def forget_peak(pid: int) -> None:
    """The peak of resident memory is counted from here on."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def loopback_bytes(pid: int) -> int:
    """Sent so far over the loopback interface that the process sees: how much really travels
    over sockets.
    """
    for line in _read(pid, "net/dev").decode().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[0])
    return 0


def _parent(pid: int) -> int:
    return int(_fields(pid)[1])


def _fields(pid: int) -> list[bytes]:
    """Of /proc/PID/stat, from the state on; zeros for a process that has ended."""
    return _read(pid, "stat").rpartition(b") ")[2].split() or [b"0"] * 20


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
