"""Unique process names, by which another process can tell that a process has ended.

A name contains the boot id, the PID namespace, the PID and the start time, because PIDs are
reused. It contains no host name, since containers share and change host names.
"""

import os
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
DEAD = ("Z", "X")


class ProcessId(NamedTuple):
    """Parts of a process name.

    Attributes:
        namespace: Boot id and PID namespace.
        pid: Process number.
        started: Start time in clock ticks since the boot.
    """

    namespace: str
    pid: int
    started: int

    def __str__(self) -> str:
        return f"{self.namespace}/{self.pid}/{self.started}"


def process_id(pid: int | None = None) -> str:
    """Return the name of a running process, by default of this one; empty if unsupported."""
    number = os.getpid() if pid is None else pid
    namespace, stat = pid_namespace(), _stat(number)
    return str(ProcessId(namespace, number, stat[1])) if namespace and stat else ""


def is_running(name: str) -> bool:
    """Return whether this process runs and is visible to this process."""
    process = _parsed(name)
    if process is None or process.namespace != pid_namespace():
        return False
    stat = _stat(process.pid)
    return stat is not None and stat[1] == process.started and not _is_dead(process.pid, stat[0])


def has_ended(name: str) -> bool:
    """Return whether a process has certainly ended."""
    process = _parsed(name)
    if process is None or process.namespace != pid_namespace():
        return False
    try:
        state, started = _read_stat(process.pid)
    except (FileNotFoundError, ProcessLookupError):
        return True
    except (OSError, ValueError, IndexError):
        return False
    return started != process.started or _is_dead(process.pid, state)


def pid_namespace() -> str:
    """Return boot id and PID namespace of this process; empty if unknown."""
    return _namespace_of(os.getpid())


@lru_cache(maxsize=1)
def _namespace_of(pid: int) -> str:
    """Return the namespace; empty without a comparable PID: not Linux, or a foreign /proc."""
    try:
        if os.readlink(PROC / "self") != str(pid):
            return ""
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{(PROC / 'self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def _parsed(name: str) -> ProcessId | None:
    where, *numbers = name.rsplit("/", 2)
    if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
        return None
    return ProcessId(where, *map(int, numbers))


def _stat(pid: int) -> tuple[str, int] | None:
    try:
        return _read_stat(pid)
    except (OSError, ValueError, IndexError):
        return None


def _read_stat(pid: int) -> tuple[str, int]:
    """Return state and start time; the command name before them may contain brackets."""
    fields = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    return fields[0].decode(), int(fields[19])


def _is_dead(pid: int, state: str) -> bool:
    """Return whether it is a zombie; a process with other live threads is not."""
    if state not in DEAD:
        return False
    try:
        return len(os.listdir(PROC / str(pid) / "task")) <= 1
    except OSError:
        return True
